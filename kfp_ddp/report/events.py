"""Events of a training: `metrics.jsonl` as a list of events, curves and durations."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard, TypeVar

Event = Mapping[str, Any]
E = TypeVar("E", bound=Event)
Point = tuple[float, float]
MAX_POINTS = 300
"""Points of a curve in a report."""
_MAX_OTHER_EVENTS = 2000
_MEANS = ("loss", "images_per_s", "data_wait_fraction")
_LAST = ("event", "time", "step", "epoch", "lr", "skipped_images")


def is_number(value: object) -> TypeGuard[float]:
    """Return True for a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def curve(events: Iterable[Event], kind: str, key: str) -> list[Point]:
    """Return (epoch, value) points of an event; the last value of a step that was repeated."""
    pairs = [(one.get("epoch"), one.get(key)) for one in _by_step(events, kind)]
    return [(float(x), float(y)) for x, y in pairs if is_number(x) and is_number(y)]


def resumed_epochs(events: Sequence[Event]) -> list[float]:
    """Return the epochs at which a training resumed."""
    factor = epochs_per_step(events)
    steps = [e.get("resumed_from_step") for e in events if e.get("event") == "start"]
    return [step * factor for step in steps if is_number(step) and step > 0]


def checkpoint_epochs(events: Sequence[Event]) -> list[float]:
    """Return the epochs at which checkpoints were written."""
    factor = epochs_per_step(events)
    steps = {e.get("step") for e in events if e.get("event") == "checkpoint"}
    return sorted(step * factor for step in steps if is_number(step) and factor)


def epochs_per_step(events: Iterable[Event]) -> float:
    """Return the part of an epoch that one step is; 0 if no event has both."""
    for e in events:
        step, epoch = e.get("step"), e.get("epoch")
        if e.get("event") == "step" and is_number(step) and step > 0 and is_number(epoch):
            return epoch / step
    return 0.0


def training_time(events: Sequence[Event]) -> tuple[float, float]:
    """Return the seconds of a training without interruptions, and its end, Unix time; or (0, 0)."""
    seconds, previous, last = 0.0, 0.0, 0.0
    for event in events:
        now = event.get("time")
        if not is_number(now):
            continue
        if previous and event.get("event") != "start":
            seconds += max(0.0, now - previous)
        previous, last = now, max(last, now)
    return seconds, last


def downsample(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return at most `MAX_POINTS` steps, which are means; of a repeated step the last values."""
    steps = _by_step(events, "step")
    size = -(-len(steps) // MAX_POINTS) or 1
    means = [_mean(steps[at : at + size]) for at in range(0, len(steps), size)]
    kinds = ("start", "eval", "checkpoint", "ranks", "unreadable", "end")
    others = [e for e in events if e.get("event") in kinds][-_MAX_OTHER_EVENTS:]
    rest = [{k: v for k, v in e.items() if k != "class_weights"} for e in others]
    return sorted([*means, *rest], key=lambda e: e["time"] if is_number(e.get("time")) else 0.0)


def _by_step(events: Iterable[E], kind: str) -> list[E]:
    last = {e["step"]: e for e in events if e.get("event") == kind and is_number(e.get("step"))}
    return [last[step] for step in sorted(last)]


def _mean(steps: Sequence[Event]) -> dict[str, Any]:
    """Return the last of several steps, with the means of `_MEANS`; counts are running totals."""
    event: dict[str, Any] = {key: steps[-1].get(key) for key in _LAST}
    for key in _MEANS:
        values = [step[key] for step in steps if is_number(step.get(key))]
        event[key] = sum(values) / len(values) if values else None
    return event
