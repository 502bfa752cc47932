"""The lines of many pods on stdout, and how far each log was printed."""

import json
import re
import sys
import threading
import time
from collections import deque
from datetime import datetime
from typing import NamedTuple

from kfp_ddp.core.text import from_json

# The last lines of each pod, to find why it ended.
RECENT_LINES = 400
# A pod that is replaced again and again counts as a new one each time.
RECENT_PODS = 256
STOP_SECONDS = 0.02
RFC_3339 = re.compile(r"(.{19})(?:\.([0-9]*))?(.*)")


class Stamp(NamedTuple):
    """The time of a line to the nanosecond. The text drops trailing zeros, so it does not sort."""

    seconds: int
    nanos: int

    @classmethod
    def parse(cls, text: str) -> "Stamp":
        """Parse RFC 3339 as the kubelet writes it."""
        parts = RFC_3339.fullmatch(text)
        if parts is None:
            raise ValueError(f"{text!r} is not a time")
        seconds, fraction, zone = parts.groups("")
        if zone in ("Z", ""):
            zone = "+00:00"
        whole = datetime.fromisoformat(seconds + zone)
        return cls(int(whole.timestamp()), int(fraction.ljust(9, "0")[:9]))


class LogCursor(NamedTuple):
    """How far a container's log was printed: up to `stamp`, with `lines` of that time."""

    restart: int
    stamp: Stamp
    lines: int


class Printer:
    """Prints the lines of many pods and records the cursor of each log, under one lock."""

    def __init__(self) -> None:
        self.cursors: dict[str, LogCursor] = {}
        self.recent: dict[str, deque[str]] = {}
        self.printed_at = 0.0
        """Monotonic clock of a pod's last line."""
        self.lock = threading.Lock()
        self.over = False

    def line(self, key: str, cursor: LogCursor, text: str) -> None:
        """Print a line and record its cursor, unless stopped."""
        with self.lock:
            if self.over:
                return
            self.write(text)
            self.cursors[key] = cursor
            self.printed_at = time.monotonic()
            recent = self.recent.setdefault(key.partition("/")[0], deque(maxlen=RECENT_LINES))
            recent.append(text.partition("] ")[2])
            if len(self.recent) > RECENT_PODS:
                self.recent.pop(next(iter(self.recent)))

    def stop(self) -> None:
        """Print no more lines; waits briefly for the lock, which an interrupted thread may own."""
        self.over = True
        if self.lock.acquire(timeout=STOP_SECONDS):
            self.lock.release()

    def say(self, text: str) -> None:
        """Print a message of the launcher."""
        with self.lock:
            self.write(text)

    def write(self, text: str) -> None:
        """Print a line."""
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    def dump(self) -> str:
        """Return the cursors as JSON, without the lock, which an interrupted thread may own."""
        cursors = self.cursors.copy()  # other threads change it
        rows = {
            key: [cursor.restart, *cursor.stamp, cursor.lines] for key, cursor in cursors.items()
        }
        return json.dumps(rows)

    def last_lines(self) -> dict[str, list[str]]:
        """Return the last lines of each pod's log, by uid."""
        recent = self.recent.copy()  # other threads change it
        return {uid: list(lines) for uid, lines in recent.items()}

    def load(self, text: str) -> None:
        """Load the cursors of an earlier launcher; ignore an invalid file."""
        try:
            for key, (restart, seconds, nanos, lines) in from_json(text).items():
                self.cursors[key] = LogCursor(restart, Stamp(seconds, nanos), lines)
        except (ValueError, TypeError, AttributeError):
            self.cursors = {}
