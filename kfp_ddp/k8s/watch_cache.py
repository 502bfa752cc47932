"""What the cluster holds now, kept by watches that outlive whatever may interrupt them."""

import json
import threading
import time
from collections.abc import Callable

from kfp_ddp.k8s.api import STARTING, Api, ApiError, Object

# A watch is opened anew this often, so that a connection cut without a word is noticed.
WATCH_SECONDS = 60
REMOVED = 4096
"""Objects that went which are remembered: more than go between two looks."""


def whole(item: Object) -> Object:
    """All of an object, where `keep` of WatchCache is to leave nothing out."""
    return item


class WatchCache(threading.Thread):
    """What a collection holds now, kept by LIST and WATCH across every kind of interruption.

    `objects` maps uid to object, `removed` those that a watch saw go last, as they were then. A
    server that forbids the watch for good sets `forbidden`.

    Args:
        api: The cluster, asked over connections of our own.
        path: The collection.
        query: Selects of it.
        changed: Is set with each change.
        keep: What is kept of an object, for the whole of a thousand pods is a hundred MB.
    """

    def __init__(
        self,
        api: Api,
        path: str,
        query: dict[str, str],
        changed: threading.Event,
        keep: Callable[[Object], Object] = whole,
    ) -> None:
        super().__init__(daemon=True, name=f"watch {path}")
        self.api, self.path, self.query, self.changed = api.another(), path, query, changed
        self.keep = keep
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
        try:
            self._keep_up()
        finally:
            self.api.close()

    def _keep_up(self) -> None:
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
        objects: dict[str, Object] = {}
        for found in self.api.pages(self.path, self.query):
            for item in found.get("items") or []:
                objects[item["metadata"]["uid"]] = self.keep(item)
        self.objects = objects
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
                objects, uid = dict(self.objects), item["metadata"]["uid"]
                if event["type"] == "DELETED":
                    self.removed[uid] = self.keep(item)
                    while len(self.removed) > REMOVED:
                        self.removed.pop(next(iter(self.removed)))
                    objects.pop(uid, None)
                else:
                    objects[uid] = self.keep(item)
                self.objects = objects
                self.changed.set()
        except ApiError as error:
            if error.status == 0:
                # The connection was cut: go on from the last event seen.
                time.sleep(0.2)
                return version
            raise
        return version
