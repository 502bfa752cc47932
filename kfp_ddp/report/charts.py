"""Charts as SVG that stretches to its column, with text in HTML that retains its size."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from markupsafe import Markup

from kfp_ddp.report.events import MAX_POINTS, Point
from kfp_ddp.report.render import render

WIDTH = 640
"""Width of the SVG inside the axes, in its own units."""
HEIGHT = 320
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
    inside = [tick for tick in _ticks(low, high, about) if low <= tick <= high]
    return Axis(low, high, [(tick, _label(tick, False)) for tick in inside])


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
    return render(
        "chart.html",
        title=title,
        label=label,
        x=x,
        y=y,
        x_label=x_label,
        shapes=list(shapes),
        keys=list(keys),
        width=WIDTH,
        height=HEIGHT,
    )


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
    points = [point for s in curves for point in s.points]
    xs = [x for x, _ in points]
    x_axis = exact(min(xs), max(xs), 6)
    y_axis = _y_axis([y for _, y in points], percent, from_zero)
    shapes, keys = _with_marks(marks, x_axis)
    names = [s.name if from_zero else _with_last_value(s, percent) for s in curves]
    for name, s in zip(names, curves, strict=True):
        if name:
            keys.append(LegendEntry(name, s.colour))
        shapes += _curve(s, x_axis, y_axis)
    x, y = min(points, key=lambda point: point[1])
    if y < y_axis.low:
        keys.append(LegendEntry(f"▾ below the axis: {y * 100:.1f}% at epoch {x:.3g}"))
        shapes.append(Shape(f"M{x_axis.x(x):.1f} {HEIGHT}v-14", "mark"))
    if y_axis.log:
        keys.append(LegendEntry("logarithmic"))
    content = "curves" if from_zero else "last values"
    label = f"{title} by epoch; {content}: {', '.join(names)}"
    return plot(title, x_axis, y_axis, "epoch", shapes, keys, label)


def _with_marks(marks: Sequence[Marks], x_axis: Axis) -> tuple[list[Shape], list[LegendEntry]]:
    """Return the marks inside the axis, and their legend."""
    shapes = []
    keys = []
    for mark in marks:
        if path := _marks_path(mark, x_axis):
            shapes.append(Shape(path, "mark" if mark.line else "tick"))
            keys.append(LegendEntry(mark.name, None, "dash" if mark.line else ""))
    return shapes, keys


def _marks_path(mark: Marks, x_axis: Axis) -> str:
    """Return the marks inside the axis as path data."""
    inside = [x for x in mark.xs if x_axis.low <= x <= x_axis.high]
    top = 0 if mark.line else HEIGHT - 12
    return "".join(f"M{x_axis.x(x):.1f} {top}V{HEIGHT}" for x in inside)


def _with_last_value(series: Series, percent: bool) -> str:
    """Return the name of a curve with its last value."""
    last = series.points[-1][1]
    return f"{series.name} {last * 100:.2f}%" if percent else f"{series.name} {last:.4g}"


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
    last = ticks[-1][0]
    return Axis(axis.low, last if last >= high else axis.high, ticks)


def _curve(series: Series, x_axis: Axis, y_axis: Axis) -> list[Shape]:
    """Return the line above the low end of the axis, with dots if there are few points."""
    pieces: list[list[Point]] = [[]]
    previous: Point | None = None
    for point in series.points:
        visible = point[1] >= y_axis.low
        if previous is not None and visible != (previous[1] >= y_axis.low):
            crossing = _crossing(previous, point, y_axis.low)
            if visible:
                pieces.append([crossing])
            else:
                pieces[-1].append(crossing)
                pieces.append([])
        if visible:
            pieces[-1].append(point)
        previous = point
    lines = [[(x_axis.x(x), y_axis.y(y)) for x, y in piece] for piece in pieces if piece]
    path = "".join("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in line) for line in lines)
    shapes = [Shape(path, "curve", series.colour)]
    if len(series.points) <= _MAX_DOTS:
        dots = [(x, y) for x, y in series.points if y >= y_axis.low]
        shapes += [dot(x_axis.x(x), y_axis.y(y), series.colour) for x, y in dots]
    return shapes


def _crossing(first: Point, second: Point, y: float) -> Point:
    """Return where the line from one point to another one has the height `y`."""
    part = (y - first[1]) / (second[1] - first[1])
    return first[0] + part * (second[0] - first[0]), y


def _thin(series: Iterable[Point]) -> list[Point]:
    """Return at most `MAX_POINTS` finite points: the last x and the mean y of each group."""
    points = [(x, y) for x, y in series if math.isfinite(x) and math.isfinite(y)]
    if len(points) <= MAX_POINTS:
        return points
    size = math.ceil(len(points) / MAX_POINTS)
    groups = [points[start : start + size] for start in range(0, len(points), size)]
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
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [round(k * step, 12) for k in range(first, last + 1)]


def confusion_matrix(
    classes: Sequence[str], counts: Sequence[Sequence[int]], others: Sequence[int] = ()
) -> Markup:
    """Return a heat map of `counts[true][predicted]`, shaded by the share of the true class.

    `others` are the samples of each true class that were predicted as a class outside the matrix.
    """
    count = len(classes)
    columns = [*classes, "other classes"] if others else list(classes)
    short = [shorten(name, 22) for name in columns]
    place = _Geometry.create(count, max(map(len, short), default=1))
    least_shade = _MIN_NUMBERED_SHADE if place.numbered else 1
    numbers = []
    blocks: dict[tuple[str, int], list[str]] = {}
    for cell in _cells(counts, others):
        shade = max(_shade(cell.samples / cell.total), least_shade)
        kind = "heat" if cell.row == cell.column else "miss"
        # One path for each shade: 100 x 100 cells are a few kilobytes.
        blocks.setdefault((kind, shade), []).append(place.square(cell))
        if place.numbered:
            title = f"{classes[cell.row]} predicted as {columns[cell.column]}"
            title += f": {cell.samples} of {cell.total}"
            numbers.append(place.number(cell, _style(kind, shade), title))
    correct = sum(counts[number][number] for number in range(count))
    samples = sum(map(sum, counts)) + sum(others)
    return render(
        "matrix.html",
        label=f"Confusion matrix of {count} classes: {correct} of {samples} on the diagonal",
        width=place.left + len(columns) * place.cell + 8,
        height=place.top + count * place.cell + place.below + 22,
        left=place.left,
        top=place.top,
        cell=place.cell,
        rows=count,
        columns=list(zip(short, columns, strict=True)),
        named=place.named,
        vertical=place.vertical,
        text=place.text,
        blocks=[(kind, s / _SHADES, "".join(d)) for (kind, s), d in sorted(blocks.items())],
        grid=_grid(place, count, len(columns)),
        values=numbers,
        legend=[(kind, _shade(share) / _SHADES, text) for kind, share, text in _LEGEND],
    )


class _Cell(NamedTuple):
    """Samples of a true class (row) that were predicted as another (column)."""

    row: int
    column: int
    samples: int
    total: int
    """Samples of the true class."""


def _cells(counts: Sequence[Sequence[int]], others: Sequence[int]) -> Iterator[_Cell]:
    """Yield the cells with samples; `others` are the last column, or empty."""
    for row, own in enumerate(counts):
        line = [*own, *others[row : row + 1]]
        total = sum(line)
        for column, count in enumerate(line):
            if count:
                yield _Cell(row, column, count, total)


def _style(kind: str, shade: int) -> str:
    """Return the CSS class of a number, so that it can be read on its cell."""
    if shade > _INVERT_FROM:
        return " over"
    return " few" if kind == "miss" and shade <= _FAINT_UP_TO else ""


@dataclass(frozen=True)
class _Geometry:
    """Sizes and places in a matrix, in pixels."""

    named: bool
    """Whether rows and columns have names."""
    numbered: bool
    """Whether cells have numbers."""
    vertical: bool
    """Whether the names of the columns are vertical."""
    cell: int
    text: float
    left: int
    top: int
    below: int

    @classmethod
    def create(cls, classes: int, longest: int) -> "_Geometry":
        """Return what fits a number of classes, the longest name of which has `longest` letters."""
        named = classes <= _MAX_NAMED
        numbered = classes <= MAX_NUMBERED
        cell = max(8, min(44, 480 // classes)) if named else 7
        if numbered:
            cell = max(cell, 30)
        text = min(12.0, max(8.0, cell - 2.0))
        width = longest * text * 0.58
        vertical = named and width > cell - 4
        edge = round(width) + 12 if named else 8
        below = 4
        if named:
            below = edge if vertical else 20
        return cls(named, numbered, vertical, cell, text, edge + 20, 4, below)

    def square(self, cell: _Cell) -> str:
        """Return a cell as path data."""
        x = self.left + cell.column * self.cell
        y = self.top + cell.row * self.cell
        return f"M{x} {y}h{self.cell}v{self.cell}h-{self.cell}z"

    def number(self, cell: _Cell, style: str, title: str) -> dict[str, Any]:
        """Return the number in a cell, for the template."""
        return {
            "x": self.left + cell.column * self.cell + self.cell / 2,
            "y": self.top + cell.row * self.cell + self.cell / 2,
            "size": min(self.text, self.cell * 1.5 / len(str(cell.samples))),
            "style": style,
            "title": title,
            "count": cell.samples,
        }


def _shade(share: float) -> int:
    return min(_SHADES, math.ceil(_SHADES * math.sqrt(share)))


def _grid(place: _Geometry, rows: int, columns: int) -> str:
    """Return the frame, and the lines between cells with numbers, as path data."""
    left = place.left
    top = place.top
    width = columns * place.cell
    height = rows * place.cell
    path = f"M{left} {top}h{width}v{height}h-{width}z"
    if place.numbered:
        path += "".join(f"M{left} {top + y}h{width}" for y in range(place.cell, height, place.cell))
        path += "".join(f"M{left + x} {top}v{height}" for x in range(place.cell, width, place.cell))
    return path


def shorten(name: str, length: int) -> str:
    """Return `name` without its middle part if it is longer than `length`."""
    if len(name) <= length:
        return name
    half = (length - 1) // 2
    return f"{name[: length - 1 - half]}…{name[-half:]}"
