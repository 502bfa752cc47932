"""Confusion matrix as an SVG heat map."""

import math
from collections.abc import Sequence

from markupsafe import Markup

from kfp_ddp.report.render import render

MAX_CLASSES = 100
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


def confusion_matrix(
    classes: Sequence[str],
    counts: Sequence[Sequence[int]],
    others: Sequence[int] = (),
) -> Markup:
    """Return an SVG heat map of `counts[true][predicted]`, shaded by the share of the true class.

    Correct and incorrect predictions have different colours, so that an error is visible beside a
    strong diagonal. Cells have numbers up to 20 classes, and edges have names up to 50. `others`
    are the samples of each true class that were predicted as a class outside the matrix. Raise
    ValueError for more than `MAX_CLASSES` classes.
    """
    n = len(classes)
    if n > MAX_CLASSES:
        raise ValueError(f"{n} classes: a matrix shows at most {MAX_CLASSES}")
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
