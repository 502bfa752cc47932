"""Self-contained pictures for HTML artifacts: inline SVG and CSS, no scripts, nothing fetched.

The KFP UI shows an HTML artifact in an iframe with `sandbox="allow-scripts"`, so whatever is
not in the document itself is not there. Colours follow the reader's light or dark scheme.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, TypeGuard

Point = tuple[float, float]
MAX_POINTS = 300
COLOURS = 6
MAX_CELLS_SIDE = 100

# Series colours: the Okabe-Ito palette, told apart under all common colour blindness.
_STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1c2733;--soft:#5c6b7a;--line:#dde3e9;
--card:#f5f7f9;--s0:#0072b2;--s1:#d55e00;--s2:#009e73;--s3:#b2408a;--s4:#a66f00;--s5:#3a6b8f;--good:#00714f;--heat:0,96,168;--miss:196,78,0;--invert:#fff}
@media(prefers-color-scheme:dark){:root{--paper:#14191f;--ink:#e4e9ee;--soft:#9aa8b5;--line:#2e3841;
--card:#1c232b;--s0:#56b4e9;--s1:#f0954a;--s2:#2fc79a;--s3:#e08fc0;--s4:#e6b800;--s5:#a9c7e8;--good:#2fc79a;--heat:86,180,233;
--miss:240,149,74;--invert:#0d1217}}
*{box-sizing:border-box}
body{margin:0 auto;padding:20px 24px 40px;max-width:1080px;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
h1{font-size:22px;line-height:1.25;margin:0 0 2px;font-weight:650}
h2{font-size:16px;margin:34px 0 10px;font-weight:650}
p{margin:6px 0}.soft{color:var(--soft)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(138px,1fr));gap:10px;margin:16px 0}
.card{background:var(--card);border-radius:8px;padding:10px 14px}
.card b{display:block;font-size:19px;font-weight:650;white-space:nowrap;
font-variant-numeric:tabular-nums}
.card span{color:var(--soft);font-size:13px}
.row{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(400px,100%),1fr));gap:20px}
.scroll{overflow-x:auto}.narrow{max-width:640px}
svg{display:block;max-width:100%;height:auto}
svg text{font:12px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;fill:var(--soft)}
svg .head{fill:var(--ink);font-size:14px;font-weight:600}
svg .grid{stroke:var(--line);stroke-width:1}
svg .curve{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
svg .value{fill:var(--ink);text-anchor:middle;dominant-baseline:central}
svg .over{fill:var(--invert)}
table{border-collapse:collapse;width:100%;font-size:14px;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:4px 10px;border-bottom:1px solid var(--line)}
th{color:var(--soft);font-weight:500}
th:first-child,td:first-child{text-align:left;max-width:340px;overflow-wrap:anywhere}
.pairs :is(th,td):nth-child(2){text-align:left}
.plain td,.plain th{text-align:left;overflow-wrap:anywhere}.plain th{width:1%;white-space:nowrap}
.thumbs{display:grid;grid-template-columns:repeat(auto-fill,minmax(136px,1fr));gap:12px;margin:0;
padding:0;list-style:none}
.thumbs li{background:var(--card);border-radius:8px;padding:10px;font-size:13px;line-height:1.4;
overflow-wrap:anywhere}
.thumbs img{width:100%;aspect-ratio:1;object-fit:contain;border-radius:4px;display:block;
margin-bottom:6px;image-rendering:auto}
.thumbs img.tiny{image-rendering:pixelated}
.bar{background:var(--line);border-radius:3px;height:8px;min-width:60px}
.bar i{display:block;height:8px;border-radius:3px;background:var(--s0)}
details{margin-top:10px}summary{cursor:pointer;color:var(--soft)}
"""


@dataclass(frozen=True)
class Series:
    """One curve: its name in the legend, its points (x, y) by rising x, its colour of `COLOURS`."""

    name: str
    points: Sequence[Point]
    colour: int = 0


def page(title: str, body: str) -> str:
    """A whole HTML document around `body`, which is HTML already."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>{body}</body></html>\n"
    )


def cards(values: Iterable[tuple[str, str]]) -> str:
    """A row of headline numbers, from (label, value) pairs."""
    inner = "".join(
        f'<div class="card"><b>{escape(value)}</b><span>{escape(label)}</span></div>'
        for label, value in values
    )
    return f'<div class="cards">{inner}</div>'


def line_chart(
    title: str,
    series: Sequence[Series],
    x_label: str,
    *,
    percent: bool = False,
    bottom: float | None = None,
    last_values: bool = True,
) -> str:
    """An SVG line chart; points that are not finite are left out, long series are averaged down.

    Args:
        title: Heading, and the name that a screen reader says.
        series: Curves in one pair of axes.
        x_label: What x is, with its unit.
        percent: Label y as percent of 1.
        bottom: Start of the y axis; None to start at the smallest value.
        last_values: Tell each curve's last value in the legend.
    """
    drawn = [Series(s.name, _thin(_finite(s.points)), s.colour) for s in series]
    drawn = [s for s in drawn if s.points]
    width, height, left, right, top, foot = 640, 320, 56, 16, 58, 40
    parts = [f'<text class="head" x="0" y="16">{escape(title)}</text>']
    if not drawn:
        parts.append(f'<text x="{left}" y="{height / 2:.0f}">nothing recorded</text>')
        return _svg(width, height, f"{title}: nothing recorded", parts)

    xs = [x for s in drawn for x, _ in s.points]
    ys = [y for s in drawn for _, y in s.points]
    y_ticks = _ticks(min(ys) if bottom is None else min(bottom, *ys), max(ys), 5)
    x_low, x_high = min(xs), max(xs)
    if x_low == x_high:
        x_low, x_high = x_low - 0.5, x_high + 0.5
    x_ticks = [t for t in _ticks(x_low, x_high, 7) if x_low <= t <= x_high]
    y_low, y_high = y_ticks[0], y_ticks[-1]

    def across(x: float) -> float:
        return left + (x - x_low) / (x_high - x_low) * (width - left - right)

    def down(y: float) -> float:
        return height - foot - (y - y_low) / (y_high - y_low) * (height - foot - top)

    for tick in y_ticks:
        y = down(tick)
        label = f"{tick * 100:.4g}%" if percent else f"{tick:.6g}"
        parts.append(
            f'<path class="grid" d="M{left} {y:.1f}H{width - right}"/>'
            f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
        )
    parts.extend(
        f'<text x="{across(tick):.1f}" y="{height - foot + 18}" text-anchor="middle">'
        f"{tick:.6g}</text>"
        for tick in x_ticks
    )
    parts.append(
        f'<text x="{(left + width - right) / 2:.0f}" y="{height - 4}" text-anchor="middle">'
        f"{escape(x_label)}</text>"
    )
    legend = float(left)
    said = []
    for s in drawn:
        last = s.points[-1][1]
        value = f"{last * 100:.2f}%" if percent else f"{last:.4g}"
        name = f"{s.name} {value}" if last_values else s.name
        said.append(name)
        colour = f"var(--s{s.colour})"
        path = "L".join(f"{across(x):.1f} {down(y):.1f}" for x, y in s.points)
        parts.append(f'<path class="curve" stroke="{colour}" d="M{path}"/>')
        if len(s.points) <= 40:
            parts.extend(
                f'<circle cx="{across(x):.1f}" cy="{down(y):.1f}" r="3" fill="{colour}"/>'
                for x, y in s.points
            )
        parts.append(
            f'<path stroke="{colour}" stroke-width="3" d="M{legend:.0f} 36h18"/>'
            f'<text x="{legend + 24:.0f}" y="40">{escape(name)}</text>'
        )
        legend += 24 + 7 * len(name) + 24
    told = "last values" if last_values else "curves"
    return _svg(width, height, f"{title} by {x_label}; {told}: {', '.join(said)}", parts)


def confusion_matrix(classes: Sequence[str], counts: Sequence[Sequence[int]]) -> str:
    """An SVG heat map of `counts[true][predicted]`, shaded by the share of the true class.

    Hits and misses have colours of their own, so that a miss stands out beside a strong diagonal.
    Numbers stand in the cells up to 20 classes, names at the edges up to 50.

    Raises:
        ValueError: with more than `MAX_CELLS_SIDE` classes, where a picture shows nothing.
    """
    n = len(classes)
    if n > MAX_CELLS_SIDE:
        raise ValueError(f"{n} classes: a picture holds at most {MAX_CELLS_SIDE}")
    named = n <= 50
    cell = max(8, min(64, 720 // n)) if named else 7
    text = min(12.0, max(8.0, cell - 2.0))
    short = [_shorten(name, 22) for name in classes]
    edge = round(max((len(s) for s in short), default=1) * text * 0.58) + 12 if named else 8
    left, top = edge + 20, 26
    tall = named and max(map(len, short), default=1) * text * 0.58 > cell - 4
    below = (edge if tall else 20) if named else 4
    width, height = left + n * cell + 8, top + n * cell + below + 22
    parts = []
    blocks: dict[tuple[str, int], list[str]] = {}
    for i, row in enumerate(counts):
        total = sum(row)
        for j, count in enumerate(row):
            if not count:
                continue
            share = count / total
            # Twenty shades make one path each: 100 x 100 cells stay a few kilobytes.
            shade = max(2 if n <= 20 else 5, math.ceil(20 * math.sqrt(share)))
            kind = "heat" if i == j else "miss"
            x, y = left + j * cell, top + i * cell
            blocks.setdefault((kind, shade), []).append(f"M{x} {y}h{cell}v{cell}h-{cell}z")
            if n <= 20:
                over = " over" if shade > 11 else ""
                parts.append(
                    f'<text class="value{over}" x="{x + cell / 2:g}" y="{y + cell / 2:g}" '
                    f'style="font-size:{min(text, cell * 1.5 / len(str(count))):.0f}px">'
                    f"<title>{escape(classes[i])} taken for {escape(classes[j])}: {count} of "
                    f"{total}</title>{count}</text>"
                )
    shades = [
        f'<path fill="rgba(var(--{kind}),{shade / 20:g})" d="{"".join(cells)}"/>'
        for (kind, shade), cells in sorted(blocks.items())
    ]
    side = n * cell
    lines = range(cell, side, cell) if n <= 20 else range(0)
    across = "".join(f"M{left} {top + at}h{side}M{left + at} {top}v{side}" for at in lines)
    frame = f'<path class="grid" fill="none" d="M{left} {top}h{side}v{side}h-{side}z{across}"/>'
    names = []
    for k, name in enumerate(short if named else []):
        middle = k * cell + cell / 2
        size = f'style="font-size:{text}px"'
        full = f"<title>{escape(classes[k])}</title>{escape(name)}"
        names.append(
            f'<text {size} x="{left - 6}" y="{top + middle + text / 3:.1f}" text-anchor="end">'
            f"{full}</text>"
        )
        beside, under = left + middle, top + side + (8 if tall else 16)
        turn = f'transform="rotate(-90 {beside:g} {under})" text-anchor="end"' if tall else ""
        turn = turn or 'text-anchor="middle"'
        shift = text / 3 if tall else 0.0
        names.append(f'<text {size} x="{beside:g}" y="{under + shift:.1f}" {turn}>{full}</text>')
    hits = sum(counts[i][i] for i in range(n))
    total = sum(map(sum, counts))
    axes = (
        f'<text x="{left + side / 2:g}" y="{height - 4}" text-anchor="middle">predicted</text>'
        f'<text x="12" y="{top + side / 2:g}" text-anchor="middle" '
        f'transform="rotate(-90 12 {top + side / 2:g})">true</text>'
    )
    label = f"Confusion matrix of {n} classes: {hits} of {total} on the diagonal"
    return _svg(width, height, label, [*shades, frame, *parts, *names, axes], natural=True)


def training_curves(metrics: Path) -> str:
    """Loss and accuracy over the epochs as two charts, from a run's `metrics.jsonl`.

    A missing file, or one without any, gives ''.
    """
    events = read_events(metrics)

    def series(kind: str, name: str, key: str, colour: int) -> Series:
        return Series(name, curve(events, kind, key), colour)

    loss = [series("step", "training", "loss", 0), series("eval", "validation", "loss", 1)]
    accuracy = [series("eval", "top 1", "accuracy", 0), series("eval", "top 5", "top5", 2)]
    if not any(each.points for each in (*loss, *accuracy)):
        return ""
    charts = line_chart("Loss", loss, "epoch", bottom=0.0) + line_chart(
        "Validation accuracy", accuracy, "epoch", percent=True
    )
    return f'<div class="row">{charts}</div>'


def curve(events: Iterable[Mapping[str, Any]], kind: str, key: str) -> list[Point]:
    """A figure of a training over its epochs, from the events of a kind.

    Steps that a resumed run did again count once, as last recorded.
    """
    steps = {e["step"]: e for e in events if e.get("event") == kind and _number(e.get("step"))}
    pairs = [(steps[step].get("epoch"), steps[step].get(key)) for step in sorted(steps)]
    return [(float(x), float(y)) for x, y in pairs if _number(x) and _number(y)]


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


def _svg(
    width: float, height: float, label: str, parts: Iterable[str], natural: bool = False
) -> str:
    size = f' width="{width:g}"' if natural else ' width="100%"'
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}"{size} role="img" aria-label="{escape(label)}">'
        f"<title>{escape(label)}</title>{''.join(parts)}</svg>"
    )


def _number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)


def _finite(points: Iterable[Point]) -> list[Point]:
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def _thin(points: list[Point]) -> list[Point]:
    """At most `MAX_POINTS` points, each the mean of its neighbours; the last x stays."""
    if len(points) <= MAX_POINTS:
        return points
    size = math.ceil(len(points) / MAX_POINTS)
    groups = [points[at : at + size] for at in range(0, len(points), size)]
    return [(group[-1][0], sum(y for _, y in group) / len(group)) for group in groups]


def _ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers from at or below `low` to at or above `high`, some `about` of them."""
    if high - low < 1e-9 * max(1.0, abs(high)):
        pad = abs(high) * 0.05 or 0.5
        low, high = low - pad, high + pad
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(k * step, 12) for k in range(first, last + 1)]


def _shorten(name: str, length: int) -> str:
    """`name` with its middle left out where it is longer than `length`."""
    if len(name) <= length:
        return name
    half = (length - 1) // 2
    return f"{name[: length - 1 - half]}…{name[-half:]}"
