"""A training by its events: loss, accuracy, learning rate, speed."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from kfp_ddp.report.pictures.lines import Marks, Point, Series, line_chart

Event = Mapping[str, Any]
_TOP5_SAYS_LITTLE = 0.995


def training_curves(events: Sequence[Event]) -> str:
    """Loss and accuracy over the epochs, and beneath them learning rate, speed and data wait.

    Without any of these it is ''.
    """

    def series(kind: str, name: str, key: str, colour: int) -> Series:
        return Series(name, curve(events, kind, key), colour)

    loss = [series("step", "training", "loss", 0), series("eval", "validation", "loss", 1)]
    accuracy = [series("eval", "top 1", "accuracy", 0), series("eval", "top 5", "top5", 2)]
    if accuracy[1].points and accuracy[1].points[-1][1] > _TOP5_SAYS_LITTLE:
        accuracy.pop()
    if not any(each.points for each in (*loss, *accuracy)):
        return ""
    marks = [
        Marks("resumed", resumed(events), line=True),
        Marks("| checkpoints", _epochs_of(events, "checkpoint")),
    ]
    large = line_chart("Loss", loss, "epoch", marks=marks) + line_chart(
        "Validation accuracy", accuracy, "epoch", percent=True
    )
    wait = [series("step", "", "data_wait_fraction", 1)]
    small = [
        ("Learning rate", [series("step", "", "lr", 3)], False),
        ("Images per second", [series("step", "", "images_per_s", 0)], False),
        ("Time waiting for data", wait, True),
    ]
    shown = "".join(
        line_chart(title, curves, "epoch", percent=percent, bottom=0.0, last_values=False)
        for title, curves, percent in small
        if curves[0].points
    )
    return f'<div class="row">{large}</div>' + (
        f'<div class="row three">{shown}</div>' * (shown != "")
    )


def curve(events: Iterable[Event], kind: str, key: str) -> list[Point]:
    """A figure of a training over its epochs, from the events of a kind.

    Steps that a resumed run did again count once, as last recorded.
    """
    steps = {e["step"]: e for e in events if e.get("event") == kind and is_number(e.get("step"))}
    pairs = [(steps[step].get("epoch"), steps[step].get(key)) for step in sorted(steps)]
    return [(float(x), float(y)) for x, y in pairs if is_number(x) and is_number(y)]


def resumed(events: Sequence[Event]) -> list[float]:
    """The epochs at which a training went on after a break."""
    each = epochs_per_step(events)
    steps = [e.get("resumed_from_step") for e in events if e.get("event") == "start"]
    return [step * each for step in steps if is_number(step) and step > 0]


def _epochs_of(events: Sequence[Event], kind: str) -> list[float]:
    each = epochs_per_step(events)
    steps = {e.get("step") for e in events if e.get("event") == kind}
    return sorted(step * each for step in steps if is_number(step) and each)


def epochs_per_step(events: Iterable[Event]) -> float:
    """What part of an epoch a step is; 0 where no event tells."""
    for e in events:
        step, epoch = e.get("step"), e.get("epoch")
        if e.get("event") == "step" and is_number(step) and step > 0 and is_number(epoch):
            return epoch / step
    return 0.0


def read_events(metrics: Path) -> list[dict[str, Any]]:
    """The JSON objects of a `metrics.jsonl`, one a line; torn lines are skipped, no file is []."""
    events = []
    try:
        text = metrics.read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return []
    for line in text.splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            events.append(event)
    return events


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)
