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
_OTHERS = ("start", "eval", "checkpoint", "ranks", "unreadable", "end")
_LAST = ("event", "time", "step", "epoch", "lr", "skipped_images")


def is_number(value: object) -> TypeGuard[float]:
    """Return True for a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def of_kind(events: Iterable[E], kind: str) -> list[E]:
    """Return the events of one kind."""
    return [event for event in events if event.get("event") == kind]


def numbers(events: Iterable[Event], key: str) -> list[float]:
    """Return the values of a key that are finite numbers."""
    values = (event.get(key) for event in events)
    return [value for value in values if is_number(value)]


def curve(events: Iterable[Event], kind: str, key: str) -> list[Point]:
    """Return (epoch, value) points of an event; the last value of a step that was repeated."""
    points = []
    for event in _by_step(events, kind):
        epoch = event.get("epoch")
        value = event.get(key)
        if is_number(epoch) and is_number(value):
            points.append((float(epoch), float(value)))
    return points


def resumed_epochs(events: Sequence[Event]) -> list[float]:
    """Return the epochs at which a training resumed."""
    factor = epochs_per_step(events)
    steps = numbers(of_kind(events, "start"), "resumed_from_step")
    return [step * factor for step in steps if step > 0]


def checkpoint_epochs(events: Sequence[Event]) -> list[float]:
    """Return the epochs at which checkpoints were written; [] if no step has an epoch."""
    factor = epochs_per_step(events)
    if not factor:
        return []
    steps = set(numbers(of_kind(events, "checkpoint"), "step"))
    return sorted(step * factor for step in steps)


def epochs_per_step(events: Iterable[Event]) -> float:
    """Return the part of an epoch that one step is; 0 if no event has both."""
    for event in of_kind(events, "step"):
        step = event.get("step")
        epoch = event.get("epoch")
        if not is_number(step) or not is_number(epoch):
            continue
        if step > 0:
            return epoch / step
    return 0.0


def training_time(events: Sequence[Event]) -> tuple[float, float]:
    """Return the seconds of a training without interruptions, and its end, Unix time; or (0, 0)."""
    seconds = 0.0
    previous = 0.0
    end = 0.0
    for event in events:
        now = event.get("time")
        if not is_number(now):
            continue
        # Before a start, the training was interrupted.
        if previous and event.get("event") != "start":
            seconds += max(0.0, now - previous)
        previous = now
        end = max(end, now)
    return seconds, end


def downsample(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return at most `MAX_POINTS` steps, which are means; of a repeated step the last values."""
    steps = _by_step(events, "step")
    size = max(1, math.ceil(len(steps) / MAX_POINTS))
    means = [_mean(steps[start : start + size]) for start in range(0, len(steps), size)]
    others = [event for event in events if event.get("event") in _OTHERS]
    rest = [_without_weights(event) for event in others[-_MAX_OTHER_EVENTS:]]
    return sorted([*means, *rest], key=_time)


def _without_weights(event: Event) -> dict[str, Any]:
    """Return an event without the weight of each class, of which there may be thousands."""
    short = dict(event)
    short.pop("class_weights", None)
    return short


def _time(event: Event) -> float:
    """Return the time of an event, 0 for an invalid one."""
    time = event.get("time")
    return time if is_number(time) else 0.0


def _by_step(events: Iterable[E], kind: str) -> list[E]:
    """Return the last event of each step, by step."""
    last: dict[float, E] = {}
    for event in of_kind(events, kind):
        step = event.get("step")
        if is_number(step):
            last[step] = event
    return [last[step] for step in sorted(last)]


def _mean(steps: Sequence[Event]) -> dict[str, Any]:
    """Return the last of several steps, with the means of `_MEANS`; counts are running totals."""
    event: dict[str, Any] = {key: steps[-1].get(key) for key in _LAST}
    for key in _MEANS:
        values = numbers(steps, key)
        event[key] = sum(values) / len(values) if values else None
    return event
