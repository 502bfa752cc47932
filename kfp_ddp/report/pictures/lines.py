"""Curves in one pair of axes."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kfp_ddp.report.pictures.plot import (
    HEIGHT,
    Axis,
    Key,
    across,
    dot,
    down,
    empty,
    linear,
    logarithmic,
    plot,
    within,
)

Point = tuple[float, float]
MAX_POINTS = 300
COLOURS = 6
_DOTTED = 40
"""Points up to which each has a dot."""
_WIDE = 12.0
"""Of the largest value to the smallest: above it a logarithmic axis shows both."""


@dataclass(frozen=True)
class Series:
    """One curve: its name in the legend, its points (x, y) by rising x, its colour of `COLOURS`."""

    name: str
    points: Sequence[Point]
    colour: int = 0


@dataclass(frozen=True)
class Marks:
    """Places on the x axis where something happened; `line` for a line from bottom to top."""

    name: str
    places: Sequence[float]
    line: bool = False


def line_chart(
    title: str,
    series: Sequence[Series],
    x_label: str,
    *,
    percent: bool = False,
    bottom: float | None = None,
    last_values: bool = True,
    marks: Sequence[Marks] = (),
) -> str:
    """A line chart; points that are not finite are left out, long series are averaged down.

    Without a `bottom` the y axis is chosen so that the most can be told apart: logarithmic where
    values differ by more than tenfold; of shares what the later three quarters lie in, and what
    lies below it is named in the legend.

    Args:
        title: Heading, and the name that a screen reader says.
        series: Curves in one pair of axes.
        x_label: What x is, with its unit.
        percent: Label y as percent of 1.
        bottom: Start of a linear y axis; None to choose the axis by the values.
        last_values: Tell each curve's last value in the legend.
        marks: What else happened, by x.
    """
    drawn = [Series(s.name, _thin(_finite(s.points)), s.colour) for s in series]
    drawn = [s for s in drawn if s.points]
    if not drawn:
        return empty(title)
    xs = [x for s in drawn for x, _ in s.points]
    x_axis = within(min(xs), max(xs), 6)
    y_axis = _vertical([y for s in drawn for _, y in s.points], percent, bottom)
    parts: list[str] = []
    keys: list[Key] = []
    said: list[str] = []
    for mark in marks:
        places = [x for x in mark.places if x_axis.low <= x <= x_axis.high]
        top = 0 if mark.line else HEIGHT - 12
        path = "".join(f"M{across(x_axis, x):.1f} {top}V{HEIGHT}" for x in places)
        if places:
            parts.append(f'<path class="{"mark" if mark.line else "tick"}" d="{path}"/>')
            keys.append(Key(mark.name, None, "dash" if mark.line else ""))
    for s in drawn:
        name = s.name
        if last_values:
            last = s.points[-1][1]
            name += f" {last * 100:.2f}%" if percent else f" {last:.4g}"
        said.append(name)
        if name:
            keys.append(Key(name, s.colour))
        parts += _curve(s, x_axis, y_axis)
    below = [(x, y) for s in drawn for x, y in s.points if y < y_axis.low]
    if below:
        x, y = min(below, key=lambda point: point[1])
        keys.append(Key(f"▾ below the axis: {y * 100:.1f}% at {x_label} {x:.3g}"))
        parts += [f'<path class="mark" d="M{across(x_axis, x):.1f} {HEIGHT}v-14"/>']
    told = "last values" if last_values else "curves"
    if y_axis.log:
        keys.append(Key("logarithmic"))
    return plot(
        title, x_axis, y_axis, x_label, parts, keys,
        f"{title} by {x_label}; {told}: {', '.join(said)}",
    )  # fmt: skip


def _vertical(ys: Sequence[float], percent: bool, bottom: float | None) -> Axis:
    low, high = min(ys), max(ys)
    if bottom is not None:
        return linear(min(bottom, low), high, 5, percent=percent)
    if not percent:
        return logarithmic(low, high) if 0 < low < high / _WIDE else linear(low, high, 5)
    quarter = sorted(ys)[len(ys) // 4]
    if high - quarter < (high - low) / 3 and high > quarter:
        low = max(low, quarter - (high - quarter) / 4)
    axis = linear(low, high, 5, percent=True)
    # Shares end at 1: a tick above it would name what cannot be.
    ticks = [tick for tick in axis.ticks if tick[0] <= 1 or high > 1]
    return Axis(axis.low, ticks[-1][0] if ticks[-1][0] >= high else axis.high, ticks)


def _curve(series: Series, x_axis: Axis, y_axis: Axis) -> list[str]:
    """The line above the low end of the axis, and its dots where there are few."""
    pieces: list[list[Point]] = [[]]
    before: Point | None = None
    for x, y in series.points:
        if before is not None and (y < y_axis.low) != (before[1] < y_axis.low):
            part = (y_axis.low - before[1]) / (y - before[1])
            crossing = (before[0] + part * (x - before[0]), y_axis.low)
            if y < y_axis.low:
                pieces[-1].append(crossing)
                pieces.append([])
            else:
                pieces.append([crossing])
        if y >= y_axis.low:
            pieces[-1].append((x, y))
        before = x, y
    places = [[(across(x_axis, x), down(y_axis, y)) for x, y in piece] for piece in pieces if piece]
    path = "".join("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in piece) for piece in places)
    parts = [f'<path class="curve" stroke="var(--s{series.colour})" d="{path}"/>']
    if len(series.points) <= _DOTTED:
        parts += [
            dot(across(x_axis, x), down(y_axis, y), series.colour)
            for x, y in series.points
            if y >= y_axis.low
        ]
    return parts


def _finite(points: Iterable[Point]) -> list[Point]:
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def _thin(points: list[Point]) -> list[Point]:
    """At most `MAX_POINTS` points, each the mean of its neighbours; the last x stays."""
    if len(points) <= MAX_POINTS:
        return points
    size = math.ceil(len(points) / MAX_POINTS)
    groups = [points[at : at + size] for at in range(0, len(points), size)]
    return [(group[-1][0], sum(y for _, y in group) / len(group)) for group in groups]
