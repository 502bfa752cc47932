"""Who is taken for whom, as a heat map."""

import math
from collections.abc import Sequence
from html import escape

MAX_CELLS_SIDE = 100
NUMBERED = 20
"""Classes up to which the numbers stand in the cells."""
_NAMED = 50
_SHADES = 20
_READABLE = 2
"""The least shade of a cell with a number in it; without one it is what the share says."""
_INVERTED = 11
_FAINT = 4


def confusion_matrix(
    classes: Sequence[str],
    counts: Sequence[Sequence[int]],
    others: Sequence[int] = (),
) -> str:
    """An SVG heat map of `counts[true][predicted]`, shaded by the share of the true class.

    Hits and misses have colours of their own, so that a miss stands out beside a strong diagonal.
    Numbers stand in the cells up to 20 classes, names at the edges up to 50.

    Args:
        classes: Their names.
        counts: Samples of each class by what they were taken for.
        others: How many of each class were taken for one that is not in the picture.

    Raises:
        ValueError: with more than `MAX_CELLS_SIDE` classes, where a picture shows nothing.
    """
    n = len(classes)
    if n > MAX_CELLS_SIDE:
        raise ValueError(f"{n} classes: a picture holds at most {MAX_CELLS_SIDE}")
    named, numbered = n <= _NAMED, n <= NUMBERED
    columns = [*classes, *(["other classes"] if others else [])]
    wide = len(columns)
    cell = max(8, min(44, 480 // n)) if named else 7
    if numbered:
        cell = max(cell, 30)
    text = min(12.0, max(8.0, cell - 2.0))
    short = [shorten(name, 22) for name in columns]
    edge = round(max((len(s) for s in short), default=1) * text * 0.58) + 12 if named else 8
    left, top = edge + 20, 4
    tall = named and max(map(len, short), default=1) * text * 0.58 > cell - 4
    below = (edge if tall else 20) if named else 4
    width, height = left + wide * cell + 8, top + n * cell + below + 22
    parts = []
    blocks: dict[tuple[str, int], list[str]] = {}
    for i, row in enumerate(counts):
        line = [*row, *(others[i : i + 1])]
        total = sum(line)
        for j, count in enumerate(line):
            if not count:
                continue
            # Twenty shades make one path each: 100 x 100 cells stay a few kilobytes.
            shade = math.ceil(_SHADES * math.sqrt(count / total))
            shade = min(_SHADES, max(_READABLE if numbered else 1, shade))
            kind = "heat" if i == j else "miss"
            x, y = left + j * cell, top + i * cell
            blocks.setdefault((kind, shade), []).append(f"M{x} {y}h{cell}v{cell}h-{cell}z")
            if numbered:
                over = " over" if shade > _INVERTED else ""
                over = over or (" few" if kind == "miss" and shade <= _FAINT else "")
                parts.append(
                    f'<text class="value{over}" x="{x + cell / 2:g}" y="{y + cell / 2:g}" '
                    f'style="font-size:{min(text, cell * 1.5 / len(str(count))):.0f}px">'
                    f"<title>{escape(classes[i])} taken for {escape(columns[j])}: {count} of "
                    f"{total}</title>{count}</text>"
                )
    shades = [
        f'<path fill="rgba(var(--{kind}),{shade / _SHADES:g})" d="{"".join(cells)}"/>'
        for (kind, shade), cells in sorted(blocks.items())
    ]
    frame = _frame(left, top, n, wide, cell, lines=numbered)
    names = []
    for k, name in enumerate(short if named else []):
        middle = k * cell + cell / 2
        size = f'style="font-size:{text:g}px"'
        full = f"<title>{escape(columns[k])}</title>{escape(name)}"
        if k < n:
            at = f'x="{left - 6}" y="{top + middle + text / 3:.1f}"'
            names.append(f'<text {size} {at} text-anchor="end">{full}</text>')
        beside, under = left + middle, top + n * cell + (8 if tall else 16)
        turn = f'transform="rotate(-90 {beside:g} {under})" text-anchor="end"' if tall else ""
        turn = turn or 'text-anchor="middle"'
        shift = text / 3 if tall else 0.0
        names.append(f'<text {size} x="{beside:g}" y="{under + shift:.1f}" {turn}>{full}</text>')
    hits = sum(counts[i][i] for i in range(n))
    everything = sum(map(sum, counts)) + sum(others)
    axes = (
        f'<text x="{left + wide * cell / 2:g}" y="{height - 4}" text-anchor="middle">predicted'
        f'</text><text x="12" y="{top + n * cell / 2:g}" text-anchor="middle" '
        f'transform="rotate(-90 12 {top + n * cell / 2:g})">true</text>'
    )
    label = f"Confusion matrix of {n} classes: {hits} of {everything} on the diagonal"
    return (
        f'<svg class="matrix" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" role="img" aria-label="{escape(label)}">'
        f"<title>{escape(label)}</title>{''.join([*shades, frame, *parts, *names, axes])}</svg>"
    )


def legend() -> str:
    """What the colours and shades of a matrix mean."""
    keys = "".join(
        f'<span><i class="box" style="background:rgba(var(--{kind}),{shade / _SHADES:g})"></i>'
        f"{text}</span>"
        for kind, share, text in (
            ("heat", 1.0, "told right"),
            ("miss", 0.01, "taken for another: 1 %"),
            ("miss", 0.1, "10 %"),
            ("miss", 0.5, "50 % of the true class"),
        )
        for shade in [math.ceil(_SHADES * math.sqrt(share))]
    )
    return f'<div class="key">{keys}</div>'


def _frame(left: int, top: int, rows: int, columns: int, cell: int, *, lines: bool) -> str:
    wide, high = columns * cell, rows * cell
    inner = (
        "".join(f"M{left} {top + at}h{wide}" for at in range(cell, high, cell))
        + "".join(f"M{left + at} {top}v{high}" for at in range(cell, wide, cell))
        if lines
        else ""
    )
    return f'<path class="grid" fill="none" d="M{left} {top}h{wide}v{high}h-{wide}z{inner}"/>'


def shorten(name: str, length: int) -> str:
    """`name` with its middle left out where it is longer than `length`."""
    if len(name) <= length:
        return name
    half = (length - 1) // 2
    return f"{name[: length - 1 - half]}…{name[-half:]}"
