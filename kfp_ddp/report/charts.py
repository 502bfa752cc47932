"""Charts as SVG that stretches to its column, with text in HTML that retains its size."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from markupsafe import Markup

from kfp_ddp.report.events import MAX_POINTS, Point
from kfp_ddp.report.render import render

WIDTH, HEIGHT = 640, 320
"""Size of the SVG inside the axes, in its own units."""
COLOURS = 6
"""Colours of series in `style.css`."""
_MAX_DOTS = 40
"""Points up to which each has a dot."""
_LOGARITHMIC_FROM = 12.0
"""Ratio of the largest to the smallest value from which the y axis is logarithmic."""
MAX_NUMBERED = 20
"""Classes up to which the cells have numbers."""
_MAX_NAMED = 50
_SHADES = 20
_MIN_NUMBERED_SHADE = 2
"""The least shade of a cell with a number."""
_INVERT_FROM = 11
"""Darker cells have light numbers."""
_FAINT_UP_TO = 4
"""Fainter errors have coloured numbers."""
_LEGEND = (
    ("heat", 1.0, "correct"),
    ("miss", 0.01, "incorrect: 1 %"),
    ("miss", 0.1, "10 %"),
    ("miss", 0.5, "50 % of the true class"),
)


class LegendEntry(NamedTuple):
    """An entry of the legend: its text, and the colour or the CSS class of its symbol."""

    text: str
    colour: int | None = None
    symbol: str = ""


class Shape(NamedTuple):
    """An SVG path: its data, CSS class, colours of `COLOURS` and tooltip."""

    d: str
    kind: str = ""
    stroke: int | None = None
    fill: int | None = None
    title: str = ""


@dataclass(frozen=True)
class Axis:
    """From `low` to `high`, with the values and labels of its ticks."""

    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    log: bool = False

    def share(self, value: float) -> float:
        """Return the position of a value: 0 at the low end, 1 at the high end."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def x(self, value: float) -> float:
        """Return the position on a horizontal axis, in units from the left."""
        return self.share(value) * WIDTH

    def y(self, value: float) -> float:
        """Return the position on a vertical axis, in units from the top."""
        return (1 - self.share(value)) * HEIGHT


@dataclass(frozen=True)
class Series:
    """A curve: its name, its points by ascending x, and its colour of `COLOURS`."""

    name: str
    points: Sequence[Point]
    colour: int = 0


@dataclass(frozen=True)
class Marks:
    """Events on the x axis: ticks, or lines over the full height."""

    name: str
    xs: Sequence[float]
    line: bool = False


class Part(NamedTuple):
    """A part of a sum: its name, its amount, its colour of `COLOURS` and the opacity of that."""

    name: str
    amount: float
    colour: int
    opacity: float = 1.0


def linear(low: float, high: float, about: int, *, percent: bool = False) -> Axis:
    """Return an axis that ends at round numbers, with about `about` ticks."""
    ticks = _ticks(low, high, about)
    return Axis(ticks[0], ticks[-1], [(tick, _label(tick, percent)) for tick in ticks])


def logarithmic(low: float, high: float) -> Axis:
    """Return a logarithmic axis between two of 1, 2, 5 times a power of ten, for values above 0."""
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    steps = [float(f"{digit}e{power}") for power in powers for digit in (1, 2, 5)]
    first = max(step for step in steps if step <= low * (1 + 1e-9))
    last = min(step for step in steps if step >= high * (1 - 1e-9) and step > first)
    shown = [step for step in steps if first <= step <= last]
    if len(shown) > 7:
        shown = [step for step in shown if f"{step:e}"[0] == "1"]
    return Axis(first, last, [(step, _label(step, False)) for step in shown], log=True)


def exact(low: float, high: float, about: int) -> Axis:
    """Return an axis from `low` to `high` with ticks at round numbers between them."""
    if low == high:
        low, high = low - 0.5, high + 0.5
    ticks = [t for t in _ticks(low, high, about) if low <= t <= high]
    return Axis(low, high, [(tick, _label(tick, False)) for tick in ticks])


def plot(
    title: str,
    x: Axis,
    y: Axis,
    x_label: str,
    shapes: Iterable[Shape],
    keys: Iterable[LegendEntry],
    label: str,
) -> Markup:
    """Return a figure: heading, legend, axes and shapes; `label` is for screen readers."""
    axes = {"x": x, "y": y, "x_label": x_label}
    drawing = {"shapes": list(shapes), "keys": list(keys), "width": WIDTH, "height": HEIGHT}
    return render("chart.html", title=title, label=label, **axes, **drawing)


def dot(x: float, y: float, colour: int) -> Shape:
    """Return a dot that remains round when the SVG is stretched."""
    return Shape(f"M{x:.1f} {y:.1f}h0", "dot", colour)


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    percent: bool = False,
    from_zero: bool = False,
    marks: Sequence[Marks] = (),
) -> Markup:
    """Return a line chart by epoch, of finite points; long series are averaged.

    An axis of shares covers the upper three quarters of the values; one `from_zero` has all values.
    """
    curves = [Series(s.name, _thin(s.points), s.colour) for s in series]
    curves = [s for s in curves if s.points]
    if not curves:
        return render("chart.html", title=title, label=f"{title}: nothing recorded", x=None)
    xs = [x for s in curves for x, _ in s.points]
    x_axis = exact(min(xs), max(xs), 6)
    y_axis = _y_axis([y for s in curves for _, y in s.points], percent, from_zero)
    shapes: list[Shape] = []
    keys: list[LegendEntry] = []
    names: list[str] = []
    for mark in marks:
        inside = [x for x in mark.xs if x_axis.low <= x <= x_axis.high]
        top = 0 if mark.line else HEIGHT - 12
        path = "".join(f"M{x_axis.x(x):.1f} {top}V{HEIGHT}" for x in inside)
        if inside:
            shapes.append(Shape(path, "mark" if mark.line else "tick"))
            keys.append(LegendEntry(mark.name, None, "dash" if mark.line else ""))
    for s in curves:
        name = s.name
        if not from_zero:
            last = s.points[-1][1]
            name += f" {last * 100:.2f}%" if percent else f" {last:.4g}"
        names.append(name)
        if name:
            keys.append(LegendEntry(name, s.colour))
        shapes += _curve(s, x_axis, y_axis)
    below = [(x, y) for s in curves for x, y in s.points if y < y_axis.low]
    if below:
        x, y = min(below, key=lambda point: point[1])
        keys.append(LegendEntry(f"▾ below the axis: {y * 100:.1f}% at epoch {x:.3g}"))
        shapes.append(Shape(f"M{x_axis.x(x):.1f} {HEIGHT}v-14", "mark"))
    if y_axis.log:
        keys.append(LegendEntry("logarithmic"))
    content = "curves" if from_zero else "last values"
    label = f"{title} by epoch; {content}: {', '.join(names)}"
    return plot(title, x_axis, y_axis, "epoch", shapes, keys, label)


def shares_bar(title: str, parts: Sequence[Part]) -> Markup:
    """Return one bar of the parts in their order, with their shares; empty if the sum is 0."""
    total = sum(part.amount for part in parts)
    shares = [(part, part.amount / total) for part in parts if part.amount > 0]
    return render("shares.html", title=title, shares=shares) if shares else Markup()


def _y_axis(ys: Sequence[float], percent: bool, from_zero: bool) -> Axis:
    low, high = min(ys), max(ys)
    if from_zero:
        return linear(min(0.0, low), high, 5, percent=percent)
    if not percent:
        large_ratio = 0 < low < high / _LOGARITHMIC_FROM
        return logarithmic(low, high) if large_ratio else linear(low, high, 5)
    quarter = sorted(ys)[len(ys) // 4]
    if high - quarter < (high - low) / 3 and high > quarter:
        low = max(low, quarter - (high - quarter) / 4)
    axis = linear(low, high, 5, percent=True)
    ticks = [tick for tick in axis.ticks if tick[0] <= 1 or high > 1]  # no share is above 1
    return Axis(axis.low, ticks[-1][0] if ticks[-1][0] >= high else axis.high, ticks)


def _curve(series: Series, x_axis: Axis, y_axis: Axis) -> list[Shape]:
    """Return the line above the low end of the axis, with dots if there are few points."""
    pieces: list[list[Point]] = [[]]
    previous: Point | None = None
    for x, y in series.points:
        if previous is not None and (y < y_axis.low) != (previous[1] < y_axis.low):
            part = (y_axis.low - previous[1]) / (y - previous[1])
            crossing = (previous[0] + part * (x - previous[0]), y_axis.low)
            if y < y_axis.low:
                pieces[-1].append(crossing)
                pieces.append([])
            else:
                pieces.append([crossing])
        if y >= y_axis.low:
            pieces[-1].append((x, y))
        previous = x, y
    lines = [[(x_axis.x(x), y_axis.y(y)) for x, y in piece] for piece in pieces if piece]
    path = "".join("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in line) for line in lines)
    shapes = [Shape(path, "curve", series.colour)]
    if len(series.points) <= _MAX_DOTS:
        visible = [(x, y) for x, y in series.points if y >= y_axis.low]
        shapes += [dot(x_axis.x(x), y_axis.y(y), series.colour) for x, y in visible]
    return shapes


def _thin(series: Iterable[Point]) -> list[Point]:
    """Return at most `MAX_POINTS` finite points: the last x and the mean y of each group."""
    points = [(x, y) for x, y in series if math.isfinite(x) and math.isfinite(y)]
    if len(points) <= MAX_POINTS:
        return points
    size = math.ceil(len(points) / MAX_POINTS)
    groups = [points[at : at + size] for at in range(0, len(points), size)]
    return [(group[-1][0], sum(y for _, y in group) / len(group)) for group in groups]


def _label(tick: float, percent: bool) -> str:
    return f"{tick * 100:.4g}%" if percent else f"{tick:,.6g}"


def _ticks(low: float, high: float, about: int) -> list[float]:
    """Return about `about` round numbers, from at most `low` to at least `high`."""
    if high - low < 1e-9 * max(1.0, abs(high)):
        pad = abs(high) * 0.05 or 0.5
        low, high = low - pad, high + pad
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(k * step, 12) for k in range(first, last + 1)]


def confusion_matrix(
    classes: Sequence[str], counts: Sequence[Sequence[int]], others: Sequence[int] = ()
) -> Markup:
    """Return a heat map of `counts[true][predicted]`, shaded by the share of the true class.

    `others` are the samples of each true class that were predicted as a class outside the matrix.
    """
    n = len(classes)
    named, numbered = n <= _MAX_NAMED, n <= MAX_NUMBERED
    columns = [*classes, *(["other classes"] if others else [])]
    cell = max(8, min(44, 480 // n)) if named else 7
    if numbered:
        cell = max(cell, 30)
    text = min(12.0, max(8.0, cell - 2.0))
    short = [shorten(name, 22) for name in columns]
    longest = max((len(s) for s in short), default=1) * text * 0.58
    edge = round(longest) + 12 if named else 8
    left, top = edge + 20, 4
    vertical = named and longest > cell - 4
    below = (edge if vertical else 20) if named else 4
    values = []
    blocks: dict[tuple[str, int], list[str]] = {}
    for i, row in enumerate(counts):
        line = [*row, *(others[i : i + 1])]
        total = sum(line)
        for j, count in enumerate(line):
            if not count:
                continue
            shade = max(_shade(count / total), _MIN_NUMBERED_SHADE if numbered else 1)
            kind = "heat" if i == j else "miss"
            x, y = left + j * cell, top + i * cell
            # One path for each shade: 100 x 100 cells are a few kilobytes.
            blocks.setdefault((kind, shade), []).append(f"M{x} {y}h{cell}v{cell}h-{cell}z")
            if numbered:
                faint = " few" if kind == "miss" and shade <= _FAINT_UP_TO else ""
                values.append(
                    {
                        "x": x + cell / 2,
                        "y": y + cell / 2,
                        "size": min(text, cell * 1.5 / len(str(count))),
                        "style": " over" if shade > _INVERT_FROM else faint,
                        "title": f"{classes[i]} predicted as {columns[j]}: {count} of {total}",
                        "count": count,
                    }
                )
    correct = sum(counts[i][i] for i in range(n))
    samples = sum(map(sum, counts)) + sum(others)
    return render(
        "matrix.html",
        label=f"Confusion matrix of {n} classes: {correct} of {samples} on the diagonal",
        width=left + len(columns) * cell + 8,
        height=top + n * cell + below + 22,
        left=left,
        top=top,
        cell=cell,
        rows=n,
        columns=list(zip(short, columns, strict=True)),
        named=named,
        vertical=vertical,
        text=text,
        blocks=[(kind, s / _SHADES, "".join(d)) for (kind, s), d in sorted(blocks.items())],
        grid=_grid(left, top, n, len(columns), cell, lines=numbered),
        values=values,
        legend=[(kind, _shade(share) / _SHADES, text) for kind, share, text in _LEGEND],
    )


def _shade(share: float) -> int:
    return min(_SHADES, math.ceil(_SHADES * math.sqrt(share)))


def _grid(left: int, top: int, rows: int, columns: int, cell: int, *, lines: bool) -> str:
    """Return the frame, and the lines between cells, as path data."""
    width, height = columns * cell, rows * cell
    path = f"M{left} {top}h{width}v{height}h-{width}z"
    if lines:
        path += "".join(f"M{left} {top + y}h{width}" for y in range(cell, height, cell))
        path += "".join(f"M{left + x} {top}v{height}" for x in range(cell, width, cell))
    return path


def shorten(name: str, length: int) -> str:
    """Return `name` without its middle part if it is longer than `length`."""
    if len(name) <= length:
        return name
    half = (length - 1) // 2
    return f"{name[: length - 1 - half]}…{name[-half:]}"
