"""The progress of a training in one line, from the events in its metrics.jsonl."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kfp_ddp.core.settings import mapping_in

Event = dict[str, Any]
WORDS = ("event", "status", "slowest_phase")
WAITS_FOR_DATA, WAITS_FOR_GRADIENTS = 0.1, 0.2
"""Shares of a step from which the line shows them."""


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
        self.first: Event | None = None
        self.last: Event | None = None
        self.end: Event | None = None
        self.accuracy: float | None = None

    def update(self, events: list[Event]) -> bool:
        """Add events; return whether the line has changed."""
        changed = False
        for event in map(_readable, events):
            kind = event.get("event")
            if kind == "start":
                self.total, self.first = int(event.get("steps_total", 0)), None
                self.end = None
            elif kind == "step" and "step" in event:
                self.first, self.last, changed = self.first or event, event, True
            elif kind == "eval":
                self.accuracy, changed = event.get("accuracy", self.accuracy), True
            elif kind == "end":
                self.end, changed = event, True
        return changed

    @property
    def step(self) -> int:
        """The last step that was reported; 0 for none."""
        return int({**(self.last or {}), **(self.end or {})}.get("step", 0))

    @property
    def stopped_early(self) -> bool:
        """Whether the training was complete before its last step."""
        return self.end is not None and self.end.get("status") == "done" and self.step < self.total

    def line(self, width: int | None = None) -> str:
        """Return `step 120/450 · loss 0.412 · …` with the parts that fit a width."""
        last, step = self.last or {}, self.step
        parts = {"step": f"step {step}/{self.total}" if self.total else f"step {step}"}
        if math.isfinite(loss := float(last.get("loss") or math.nan)):
            parts["loss"] = f"loss {loss:.3f}"
        if speed := float(last.get("images_per_s") or 0):
            parts["speed"] = f"{speed:,.0f} images/s"
        if waits := _waits(last):
            parts["waits"] = waits
        if self.accuracy is not None:
            parts["accuracy"] = f"val accuracy {self.accuracy:.1%}"
        if self.stopped_early:
            parts["left"] = "stopped early"
        elif (left := self.seconds_left()) is not None:
            parts["left"] = f"ETA {clock(left)}"
        for name in ("waits", "speed", "loss", "accuracy"):
            if width is not None and len(" · ".join(parts.values())) > width:
                parts.pop(name, None)
        return " · ".join(parts.values())

    def seconds_left(self) -> float | None:
        """Return the time to the last step at the rate since the first event; None for unknown."""
        if self.first is None or self.last is None or self.end or not self.total:
            return None
        steps = int(self.last["step"]) - int(self.first["step"])
        seconds = float(self.last.get("time", 0)) - float(self.first.get("time", 0))
        if steps <= 0 or seconds <= 0:
            return None
        return (self.total - int(self.last["step"])) * seconds / steps


def _readable(event: Event) -> Event:
    """Return an event without the figures that are no numbers, as a user's program may write."""
    return {
        name: value
        for name, value in event.items()
        if name in WORDS or (isinstance(value, int | float) and abs(value) < 1e18)
    }


def _waits(step: Event) -> str:
    """Return what the ranks wait for in their steps; '' if they wait little."""
    slowest = [step.get(f"slowest_{name}") for name in ("rank", "ratio", "phase")]
    match step.get("straggles"), *slowest:
        case True, int(rank), int() | float() as ratio, str(phase) if phase.isalpha():
            return f"rank {rank} takes {ratio:.1f} times as long, in {phase}"
    if (data := float(step.get("data_wait_fraction") or 0)) >= WAITS_FOR_DATA:
        return f"{data:.0%} waits for data"
    seconds = float(step.get("step_seconds") or math.inf)
    exchange = float(step.get("communication_seconds") or 0) / seconds
    return f"{exchange:.0%} waits for gradients" if exchange >= WAITS_FOR_GRADIENTS else ""


class ProgressPrinter:
    """Prints the progress of a training while it writes its metrics."""

    def __init__(self, write: Callable[[str], None], metrics: Path, seconds: float) -> None:
        self.write, self.seconds = write, seconds
        self.tail, self.progress = MetricsTail(metrics), TrainingProgress()
        self.tail.skip()
        self.is_new = False
        self.printed_at = 0.0
        self.updated_at = 0.0
        """Monotonic clock of the last metrics of the training."""

    def update(self, clock: float, at_once: bool = False) -> None:
        """Print new progress, but at most every `seconds` unless at once."""
        if self.progress.update(self.tail.read()):
            self.is_new, self.updated_at = True, clock
        if self.is_new and (at_once or clock - self.printed_at >= self.seconds):
            self.write(self.progress.line())
            self.is_new, self.printed_at = False, clock


def clock(seconds: float) -> str:
    """Return seconds as h:mm:ss or m:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
