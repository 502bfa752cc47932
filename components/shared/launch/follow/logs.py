"""The logs of all pods, each line once and in order, across cuts, restarts and adoption."""

import json
import sys
import threading
import time
from collections import deque
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from kfp_ddp.components.shared.cluster.api import Api, ApiError, Object, core
from kfp_ddp.components.shared.launch.manifests.kinds import pod_title

# A log that is quiet for so long is asked for anew, lest its connection was cut without a word.
QUIET_SECONDS = 60.0
# Of each pod so many lines are kept, for what they say of its end.
RECENT_LINES = 400


class Stamp(NamedTuple):
    """A line's time to the nanosecond; text compares wrongly, for it drops trailing zeros."""

    seconds: int
    nanos: int

    @classmethod
    def parse(cls, text: str) -> "Stamp":
        """From RFC 3339, as the kubelet writes it."""
        whole = text[:19]
        rest = text[19:]
        fraction = ""
        if rest.startswith("."):
            digits = len(rest) - len(rest[1:].lstrip("0123456789")) - 1
            fraction, rest = rest[1 : 1 + digits], rest[1 + digits :]
        at = datetime.fromisoformat(whole + ("+00:00" if rest in ("Z", "") else rest))
        return cls(int(at.timestamp()), int(fraction.ljust(9, "0")[:9] or 0))

    def since(self) -> str:
        """The whole second, which is as fine as the API server's sinceTime."""
        return datetime.fromtimestamp(self.seconds).astimezone().isoformat()


class Place(NamedTuple):
    """How far a container's log was printed: up to `stamp`, with `lines` of that very time."""

    restart: int
    stamp: Stamp
    lines: int


class Printer:
    """Prints whole lines of many pods, and knows the place of each; one lock for both."""

    def __init__(self) -> None:
        self.places: dict[str, Place] = {}
        self.recent: dict[str, deque[str]] = {}
        self.at = 0.0
        """When a pod's line was printed last, on the monotonic clock."""
        self.lock = threading.Lock()

    def line(self, key: str, place: Place, text: str) -> None:
        """Print a line and note that it is printed."""
        with self.lock:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()
            self.places[key] = place
            self.at = time.monotonic()
            recent = self.recent.setdefault(key.partition("/")[0], deque(maxlen=RECENT_LINES))
            recent.append(text.partition("] ")[2])

    def say(self, text: str) -> None:
        """Print a line of our own."""
        with self.lock:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()

    def dump(self) -> str:
        """The places as JSON.

        Without the lock, which the thread that a signal interrupts may hold.
        """
        places = self.places.copy()  # other threads add to it
        return json.dumps({key: [p.restart, *p.stamp, p.lines] for key, p in places.items()})

    def last_lines(self) -> dict[str, list[str]]:
        """The end of each pod's log, by uid."""
        recent = self.recent.copy()  # other threads add to it
        return {uid: list(lines) for uid, lines in recent.items()}

    def load(self, text: str) -> None:
        """Take up the places that an earlier launcher noted; what cannot be read is ignored."""
        try:
            for key, (restart, seconds, nanos, lines) in json.loads(text).items():
                self.places[key] = Place(restart, Stamp(seconds, nanos), lines)
        except (ValueError, TypeError, AttributeError):
            self.places = {}


class PlaceFile:
    """Keeps the places on a claim, so that a successor of this step goes on where it ended."""

    def __init__(self, path: Path, printer: Printer) -> None:
        self.path, self.printer, self.saved = path, printer, ""
        if path.exists():
            printer.load(path.read_text())

    def save(self) -> None:
        """Write the places if they changed; a claim that cannot be written costs only this."""
        text = self.printer.dump()
        if text == self.saved:
            return
        try:
            draft = self.path.with_suffix(".tmp")
            draft.write_text(text)
            draft.replace(self.path)
            self.saved = text
        except OSError:
            pass


class PodLog(threading.Thread):
    """Follows one container until it is over and every line of it is printed."""

    def __init__(self, api: Api, pod: Object, container: str, printer: Printer) -> None:
        super().__init__(daemon=True, name=f"log {pod['metadata']['name']}")
        self.api, self.container, self.printer = api.another(), container, printer
        self.path = core(api.namespace, "pods", pod["metadata"]["name"])
        self.uid = pod["metadata"]["uid"]
        self.name_of_pod = pod["metadata"]["name"]
        self.key = f"{self.uid}/{container}"
        self.title = pod_title(pod)
        self.latest = pod
        self.abandoned = threading.Event()

    def update(self, pod: Object) -> None:
        """Take in how the pod is now."""
        self.latest = pod

    def run(self) -> None:
        """Print until the container is over; every cut is bridged from the last line printed."""
        while not self.abandoned.is_set():
            restart, over = self._status()
            place = self.printer.places.get(self.key)
            if place is not None and place.restart < restart:
                # The container was restarted: the rest of the log before, then the new one.
                self._read(place.restart, previous=True, follow=False)
            whole = self._read(restart, previous=False, follow=not over)
            now, over_now = self._status()
            if whole and over and over_now and now == restart:
                return
            self.abandoned.wait(0.05 if over_now else 0.5)

    def _status(self) -> tuple[int, bool]:
        """Restarts so far, and whether the container has ended for good."""
        status = self.latest.get("status", {})
        over = status.get("phase") in ("Succeeded", "Failed")
        for container in status.get("containerStatuses") or []:
            if container["name"] == self.container:
                ended = "terminated" in (container.get("state") or {})
                never = self.latest["spec"].get("restartPolicy") == "Never"
                return int(container.get("restartCount") or 0), over or (ended and never)
        return 0, over

    def _read(self, restart: int, previous: bool, follow: bool) -> bool:
        """Print what is new of one run of the container; True when the stream ended by itself."""
        place = self.printer.places.get(self.key)
        if place is None or place.restart != restart:
            place = None
        query = {"container": self.container, "timestamps": "true"}
        if follow:
            query["follow"] = "true"
        if previous:
            query["previous"] = "true"
        if place is not None:
            query["sinceTime"] = place.stamp.since()
        seen = 0
        last = place
        passing = place is not None
        try:
            for raw in self.api.lines(f"{self.path}/log", query, QUIET_SECONDS):
                if self.abandoned.is_set():
                    return False
                if not raw.endswith(b"\n") and follow:
                    # Half a line: the connection was cut, and it will be read again in whole.
                    return False
                head, _, text = raw.decode("utf-8", "replace").rstrip("\n").partition(" ")
                try:
                    stamp = Stamp.parse(head)
                except ValueError:
                    continue
                if passing and place is not None:
                    if stamp < place.stamp:
                        continue
                    if stamp == place.stamp and seen < place.lines:
                        seen += 1
                        continue
                    passing = False
                same = last is not None and last.stamp == stamp
                last = Place(restart, stamp, last.lines + 1 if same and last else 1)
                self.printer.line(self.key, last, f"[{self.title}] {text}")
        except ApiError as error:
            if error.status == 404:
                # The pod is gone, or its earlier run is: what was not read cannot be.
                if not previous:
                    self.abandoned.set()
                return True
            return False
        return True
