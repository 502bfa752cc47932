"""The lines of all pods, each printed once, and how far each log was printed."""

import json
import re
import sys
import threading
import time
from collections import deque
from datetime import datetime
from typing import NamedTuple

# Of each pod so many lines are kept, for what they say of its end.
RECENT_LINES = 400
# And of so many pods: one that is replaced again and again is another one each time.
RECENT_PODS = 256
STOP_SECONDS = 0.02
RFC_3339 = re.compile(r"(.{19})(?:\.([0-9]*))?(.*)")


class Stamp(NamedTuple):
    """A line's time to the nanosecond; text compares wrongly, for it drops trailing zeros."""

    seconds: int
    nanos: int

    @classmethod
    def parse(cls, text: str) -> "Stamp":
        """From RFC 3339, as the kubelet writes it."""
        parts = RFC_3339.fullmatch(text)
        if parts is None:
            raise ValueError(f"{text!r} is no time")
        whole, fraction, zone = parts.groups("")
        at = datetime.fromisoformat(whole + ("+00:00" if zone in ("Z", "") else zone))
        return cls(int(at.timestamp()), int(fraction.ljust(9, "0")[:9]))

    def since(self) -> str:
        """The whole second, which is as fine as the API server's sinceTime."""
        return datetime.fromtimestamp(self.seconds).astimezone().isoformat()


class LogCursor(NamedTuple):
    """How far a container's log was printed: up to `stamp`, with `lines` of that very time."""

    restart: int
    stamp: Stamp
    lines: int


class Printer:
    """Prints whole lines of many pods, and knows the cursor of each; one lock for both."""

    def __init__(self) -> None:
        self.cursors: dict[str, LogCursor] = {}
        self.recent: dict[str, deque[str]] = {}
        self.printed_at = 0.0
        """When a pod's line was printed last, on the monotonic clock."""
        self.lock = threading.Lock()
        self.over = False

    def line(self, key: str, cursor: LogCursor, text: str) -> None:
        """Print a line and note that it is printed; neither once this is to stop."""
        with self.lock:
            if self.over:
                return
            sys.stdout.write(text + "\n")
            sys.stdout.flush()
            self.cursors[key] = cursor
            self.printed_at = time.monotonic()
            recent = self.recent.setdefault(key.partition("/")[0], deque(maxlen=RECENT_LINES))
            recent.append(text.partition("] ")[2])
            if len(self.recent) > RECENT_PODS:
                self.recent.pop(next(iter(self.recent)))

    def stop(self) -> None:
        """Print no more lines of pods, so that the cursors stay what was printed.

        Waits for a line that is being printed, but not long: the thread that a signal interrupts
        may hold the lock itself.
        """
        self.over = True
        if self.lock.acquire(timeout=STOP_SECONDS):
            self.lock.release()

    def say(self, text: str) -> None:
        """Print a line of our own."""
        with self.lock:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()

    def dump(self) -> str:
        """The cursors as JSON.

        Without the lock, which the thread that a signal interrupts may hold.
        """
        cursors = self.cursors.copy()  # other threads add to it
        return json.dumps({key: [p.restart, *p.stamp, p.lines] for key, p in cursors.items()})

    def last_lines(self) -> dict[str, list[str]]:
        """The end of each pod's log, by uid."""
        recent = self.recent.copy()  # other threads add to it
        return {uid: list(lines) for uid, lines in recent.items()}

    def load(self, text: str) -> None:
        """Take up the cursors that an earlier launcher noted; what cannot be read is ignored."""
        try:
            for key, (restart, seconds, nanos, lines) in json.loads(text).items():
                self.cursors[key] = LogCursor(restart, Stamp(seconds, nanos), lines)
        except (ValueError, TypeError, AttributeError):
            self.cursors = {}
