"""What the cluster holds now, kept by watches that outlive whatever may interrupt them."""

import json
import threading
import time

from kfp_ddp.components.shared.cluster.api import STARTING, Api, ApiError, Object

# A watch is opened anew this often, so that a connection cut without a word is noticed.
WATCH_SECONDS = 60


class WatchCache(threading.Thread):
    """What a collection holds now, kept by LIST and WATCH across every kind of interruption.

    `objects` maps uid to object, `removed` those that a watch saw go, as they were then. A server
    that forbids the watch for good sets `forbidden`.
    """

    def __init__(
        self, api: Api, path: str, query: dict[str, str], changed: threading.Event
    ) -> None:
        super().__init__(daemon=True, name=f"watch {path}")
        self.api, self.path, self.query, self.changed = api.another(), path, query, changed
        self.objects: dict[str, Object] = {}
        self.removed: dict[str, Object] = {}
        self.synced = threading.Event()
        self.forbidden = ""
        self._over = threading.Event()

    def stop(self) -> None:
        """Let the thread end at its next event."""
        self._over.set()

    def run(self) -> None:
        """List, then watch from there, for ever."""
        version, refused = "", 0
        while not self._over.is_set():
            try:
                if not version:
                    version = self._list()
                version, refused = self._watch(version), 0
            except ApiError as error:
                version = "" if error.status == 410 else version
                # Right at the start of a server rights are not known yet, so ask for a while.
                refused += error.status in STARTING
                if refused > (30 if self.synced.is_set() else 2):
                    self.forbidden = error.message
                    self.synced.set()
                    self.changed.set()
                    return
                self._over.wait(0.3 if not refused else 1.0)

    def _list(self) -> str:
        found = self.api.call("GET", self.path, query=self.query)
        self.objects = {item["metadata"]["uid"]: item for item in found.get("items", [])}
        self.synced.set()
        self.changed.set()
        return str(found["metadata"]["resourceVersion"])

    def _watch(self, version: str) -> str:
        """Take events in until the server ends the watch; returns where to go on from."""
        query = {
            **self.query,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        try:
            for line in self.api.lines(self.path, query, WATCH_SECONDS + 15):
                if self._over.is_set() or not line.endswith(b"\n"):
                    break
                event = json.loads(line)
                item = event["object"]
                if event["type"] == "ERROR":
                    status = int(item.get("code", 500))
                    raise ApiError(status, item.get("reason", ""), item.get("message", ""))
                version = item["metadata"]["resourceVersion"]
                if event["type"] == "BOOKMARK":
                    continue
                objects = dict(self.objects)
                if event["type"] == "DELETED":
                    self.removed[item["metadata"]["uid"]] = item
                    objects.pop(item["metadata"]["uid"], None)
                else:
                    objects[item["metadata"]["uid"]] = item
                self.objects = objects
                self.changed.set()
        except ApiError as error:
            if error.status == 0:
                # The connection was cut: go on from the last event seen.
                time.sleep(0.2)
                return version
            raise
        return version
