"""The progress of a training in one line, from the events in its metrics.jsonl."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kfp_ddp.core.settings import mapping_in

Event = dict[str, Any]
WORDS = ("event", "status", "slowest_phase")
# Shares of a step from which the line shows them.
WAITS_FOR_DATA = 0.1
WAITS_FOR_GRADIENTS = 0.2


class MetricsTail:
    """Reads new complete lines of a growing JSONL file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0

    def skip(self) -> None:
        """Skip the present content, which an earlier attempt wrote."""
        self.offset = self.path.stat().st_size if self.path.exists() else 0

    def read(self) -> list[Event]:
        """Return the new events, without invalid lines; an incomplete line is read later."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                data = file.read()
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self.offset += len(whole)
        return list(filter(None, map(mapping_in, whole.splitlines())))


class TrainingProgress:
    """Step, loss, speed and remaining time of a training, by its events."""

    def __init__(self) -> None:
        self.total = 0
        self.first: Event = {}
        """The first step of the present attempt; empty before it."""
        self.last: Event = {}
        """The last step; empty before any."""
        self.end: Event = {}
        """The end of the training; empty while it runs."""
        self.accuracy: float | None = None

    def update(self, events: list[Event]) -> bool:
        """Add events; return whether the line has changed."""
        changed = False
        for event in map(_readable, events):
            kind = event.get("event")
            if kind == "start":
                self.total = int(event.get("steps_total", 0))
                # Its rate is its own: an earlier attempt may have had other GPUs.
                self.first = {}
                self.end = {}
                continue
            if kind == "step" and "step" in event:
                self.first = self.first or event
                self.last = event
            elif kind == "eval":
                self.accuracy = event.get("accuracy", self.accuracy)
            elif kind == "end":
                self.end = event
            else:
                continue
            changed = True
        return changed

    @property
    def step(self) -> int:
        """The last step that was reported; 0 for none."""
        newest = {**self.last, **self.end}
        return int(newest.get("step", 0))

    @property
    def stopped_early(self) -> bool:
        """Whether the training was complete before its last step."""
        return self.end.get("status") == "done" and self.step < self.total

    def line(self, width: int | None = None) -> str:
        """Return `step 120/450 · loss 0.412 · …` with the parts that fit a width."""
        parts = {"step": f"step {self.step}"}
        if self.total:
            parts["step"] += f"/{self.total}"
        loss = _figure(self.last, "loss")
        if loss:
            parts["loss"] = f"loss {loss:.3f}"
        speed = _figure(self.last, "images_per_s")
        if speed:
            parts["speed"] = f"{speed:,.0f} images/s"
        waits = _waits(self.last)
        if waits:
            parts["waits"] = waits
        if self.accuracy is not None:
            parts["accuracy"] = f"val accuracy {self.accuracy:.1%}"
        if self.stopped_early:
            parts["left"] = "stopped early"
        elif (left := self.seconds_left()) is not None:
            parts["left"] = f"ETA {clock(left)}"
        line = " · ".join(parts.values())
        for name in ("waits", "speed", "loss", "accuracy"):
            if width is not None and len(line) > width:
                parts.pop(name, None)
                line = " · ".join(parts.values())
        return line

    def seconds_left(self) -> float | None:
        """Return the time to the last step at the rate since the first event; None for unknown."""
        if not self.first or self.end or not self.total:
            return None
        step = int(self.last["step"])
        steps = step - int(self.first["step"])
        seconds = _figure(self.last, "time") - _figure(self.first, "time")
        if steps <= 0 or seconds <= 0:
            return None
        return (self.total - step) * seconds / steps


def _readable(event: Event) -> Event:
    """Return an event without the figures that are no numbers, as a user's program may write."""
    readable: Event = {}
    for name, value in event.items():
        is_number = isinstance(value, int | float) and abs(value) < 1e18
        if is_number or name in WORDS:
            readable[name] = value
    return readable


def _figure(event: Event, name: str) -> float:
    """Return a figure of a readable event; 0 without it."""
    return float(event.get(name, 0))


def _waits(step: Event) -> str:
    """Return what the ranks wait for in their steps; '' if they wait little."""
    slowest = [step.get(f"slowest_{name}") for name in ("rank", "ratio", "phase")]
    match step.get("straggles"), *slowest:
        case True, int(rank), int() | float() as ratio, str(phase) if phase.isalpha():
            return f"rank {rank} takes {ratio:.1f} times as long, in {phase}"
    data = _figure(step, "data_wait_fraction")
    if data >= WAITS_FOR_DATA:
        return f"{data:.0%} waits for data"
    seconds = _figure(step, "step_seconds")
    if not seconds:
        return ""
    exchange = _figure(step, "communication_seconds") / seconds
    if exchange < WAITS_FOR_GRADIENTS:
        return ""
    return f"{exchange:.0%} waits for gradients"


class ProgressPrinter:
    """Prints the progress of a training while it writes its metrics."""

    def __init__(self, write: Callable[[str], None], metrics: Path, seconds: float) -> None:
        self.write = write
        self.seconds = seconds
        self.progress = TrainingProgress()
        self.tail = MetricsTail(metrics)
        self.tail.skip()
        self.is_new = False
        self.printed_at = 0.0
        self.updated_at = 0.0
        """Monotonic clock of the last metrics of the training."""

    def update(self, clock: float, at_once: bool = False) -> None:
        """Print new progress, but at most every `seconds` unless at once."""
        if self.progress.update(self.tail.read()):
            self.is_new = True
            self.updated_at = clock
        is_due = at_once or clock - self.printed_at >= self.seconds
        if self.is_new and is_due:
            self.write(self.progress.line())
            self.is_new = False
            self.printed_at = clock


def clock(seconds: float) -> str:
    """Return seconds as h:mm:ss or m:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if not hours:
        return f"{minutes}:{rest:02}"
    return f"{hours}:{minutes:02}:{rest:02}"
