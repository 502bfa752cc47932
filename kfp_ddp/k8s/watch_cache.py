"""A cache of a collection, updated by watches that survive interruptions."""

import contextlib
import json
import threading
import time
from collections.abc import Callable

from kfp_ddp.k8s.api import UNSURE, Api, ApiError, Object
from kfp_ddp.k8s.resource import Resource

# A watch is reopened this often, since a connection may be cut silently.
WATCH_SECONDS = 60
REMOVED = 4096
"""Remembered removed objects: more than are removed between two looks."""


class WatchCache(threading.Thread):
    """The objects of a collection by uid, updated by LIST and WATCH across interruptions.

    `forbidden` is the server's message if it forbids the watch for good; `reduce` returns the
    needed part of an object: a thousand full pods are a hundred MB.
    """

    def __init__(
        self,
        api: Api,
        resource: Resource,
        query: dict[str, str],
        changed: threading.Event,
        reduce: Callable[[Object], Object] = lambda item: item,
    ) -> None:
        super().__init__(daemon=True, name=f"watch {resource.plural}")
        self.api = api.another()
        self.resource = resource
        self.query = query
        self.changed = changed
        self.reduce = reduce
        self.objects: dict[str, Object] = {}
        self.removed: dict[str, Object] = {}
        self.synced = threading.Event()
        self.forbidden = ""
        self._over = threading.Event()

    def stop(self) -> None:
        """End the thread at its next event."""
        self._over.set()

    def run(self) -> None:
        """List, then watch until stopped."""
        version = ""
        refused = 0
        with contextlib.closing(self.api):
            while not self._over.is_set():
                try:
                    version = version or self._list()
                    version = self._watch(version)
                    refused = 0
                except ApiError as error:
                    version = "" if error.status == 410 else version
                    # A starting server does not know the rights yet, so retry for a while.
                    refused += error.status in UNSURE
                    if refused > (30 if self.synced.is_set() else 2):
                        self.forbidden = error.message
                        self.synced.set()
                        self.changed.set()
                        return
                    self._over.wait(0.3 if not refused else 1.0)

    def _list(self) -> str:
        objects: dict[str, Object] = {}
        for page in self.api.pages(self.resource, self.query):
            for item in page.get("items") or []:
                objects[item["metadata"]["uid"]] = self.reduce(item)
        self.objects = objects
        self.synced.set()
        self.changed.set()
        return str(page["metadata"]["resourceVersion"])

    def _watch(self, version: str) -> str:
        """Process events until the server ends the watch; return the version to resume from."""
        path = self.resource.path(self.api.namespace)
        query = {
            **self.query,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        try:
            for line in self.api.lines(path, query, WATCH_SECONDS + 15):
                if self._over.is_set() or not line.endswith(b"\n"):
                    break
                kind, item = _event_of(line)
                version = item["metadata"]["resourceVersion"]
                if kind != "BOOKMARK":
                    self._apply(kind, item)
        except ApiError as error:
            if error.status != 0:
                raise
            time.sleep(0.2)  # the connection was cut: resume from the last event
        return version

    def _apply(self, kind: str, item: Object) -> None:
        # Other threads read `objects`, so a copy is changed.
        objects = dict(self.objects)
        uid = item["metadata"]["uid"]
        if kind == "DELETED":
            self.removed[uid] = self.reduce(item)
            while len(self.removed) > REMOVED:
                self.removed.pop(next(iter(self.removed)))
            objects.pop(uid, None)
        else:
            objects[uid] = self.reduce(item)
        self.objects = objects
        self.changed.set()


def _event_of(line: bytes) -> tuple[str, Object]:
    """Return the type of an event and its object; raise ApiError for an error of the server."""
    try:
        event = json.loads(line)
        kind = event["type"]
        item = event["object"]
    except (ValueError, KeyError, TypeError):  # of a proxy
        raise ApiError(0, "", "a line is not an event") from None
    if kind == "ERROR":
        status = int(item.get("code", 500))
        raise ApiError(status, item.get("reason", ""), item.get("message", ""))
    return kind, item
