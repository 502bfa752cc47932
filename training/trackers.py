"""Trackers of experiments as sinks, on a thread that alone waits for their servers."""

import importlib.util
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.files import atomic_write


class Event(NamedTuple):
    """A line of metrics.jsonl: the event's name, its fields, and when, in seconds since 1970."""

    name: str
    fields: dict[str, Any]
    time: float


class Tracker(Protocol):
    """A run at a server."""

    def log(self, events: Sequence[Event]) -> None:
        """Keep events, in their order; whatever it raises, they come again."""


class Patient:
    """A sink that sends what metrics.jsonl holds when its server takes it; nobody waits for it.

    How far it came stands in the tracker's own file, so that what a server that was away, or a
    process that was killed, missed is sent by the next one.
    """

    PAUSE_SECONDS = 30.0
    LAST_SECONDS = 60.0
    LAST_OF_STOPPED_SECONDS = 5.0
    """The same where the training was stopped, and has no time."""

    def __init__(
        self, title: str, metrics: Path, record: Path, connect: Callable[[], Tracker]
    ) -> None:
        """Begin to connect.

        Args:
            title: What people call the tracker.
            metrics: The events, a line each, which a caller appends to before it calls.
            record: A JSON file of the tracker; this keeps `sent` in it, the bytes that were sent.
            connect: Finds or makes the run; called again where it raised.
        """
        self._title, self._connect = title, connect
        self._metrics, self._record = metrics, record
        self._tracker: Tracker | None = None
        self._changed, self._over = threading.Event(), threading.Event()
        self._told = False
        self._thread = threading.Thread(target=self._work, name=title, daemon=True)
        self._thread.start()

    def __call__(self, event: str, fields: dict[str, Any]) -> None:
        """See that the event is sent; after the last one wait a moment for the server."""
        if event == "end":
            self._over.set()
        self._changed.set()
        if event == "end":
            done = fields.get("status") == "done"
            self._thread.join(self.LAST_SECONDS if done else self.LAST_OF_STOPPED_SECONDS)
            left = _left(self._metrics, self._record)[0].count(b"\n")
            if left:
                print(f"warning: {self._title} lacks {left} events", flush=True)

    def _work(self) -> None:
        last = False
        while not last:
            self._changed.wait()
            self._changed.clear()
            last = self._over.is_set()
            if not self._sent() and not last:
                self._over.wait(self.PAUSE_SECONDS)
                self._changed.set()

    def _sent(self) -> bool:
        try:
            if self._tracker is None:
                self._tracker = self._connect()
            send_left(self._tracker, self._metrics, self._record)
        except Exception as error:  # noqa: BLE001 - whatever a tracker raises, the training goes on
            if not self._told:
                print(f"warning: {self._title} takes nothing for now: {_line(error)}", flush=True)
            self._told = True
            return False
        self._told = False
        return True


def send_left(tracker: Tracker, metrics: Path, record: Path) -> None:
    """Send what was not sent, and note that it was; raises what the tracker does."""
    lines, end = _left(metrics, record)
    tracker.log([_event(line) for line in lines.splitlines()])
    with atomic_write(record) as file:
        file.write(json.dumps({**_read(record), "sent": end}).encode())


def _left(metrics: Path, record: Path) -> tuple[bytes, int]:
    """The whole lines that were not sent, and where the last of them ends."""
    start = int(_read(record).get("sent", 0))
    with metrics.open("rb") as file:
        file.seek(start)
        lines = file.read()
    lines = lines[: lines.rfind(b"\n") + 1]
    return lines, start + len(lines)


def _event(line: bytes) -> Event:
    fields = json.loads(line)
    return Event(fields.pop("event"), fields, fields.pop("time"))


def _read(record: Path) -> dict[str, Any]:
    try:
        found = json.loads(record.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else f"{text[:200]}..."


def require(package: str, setting: str) -> None:
    """Refuse a setting whose package is not installed.

    Raises:
        InputError: saying that the image lacks it.
    """
    if importlib.util.find_spec(package) is None:
        raise InputError(
            f"{setting} needs the package {package}, which this image lacks: add it to the image, "
            f"or leave {setting} out"
        )
