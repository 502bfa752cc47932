"""Draw a compiled pipeline as an SVG: steps, what depends on what, groups, conditions, loops."""

from dataclasses import dataclass
from html import escape
from pathlib import Path

from kfp_ddp.pipelines.graph import Node, nodes

HEIGHT, GAP, BESIDE, INSIDE, TITLE, MARGIN = 44, 24, 18, 12, 26, 8
LETTER = 7.4
"""Pixels of a letter at 13 pixels, on average."""
SMALL_LETTER = 6.0
STYLE = """
  .step { fill: #eef3fb; stroke: #3a6fb5; stroke-width: 1.5 }
  .exit { fill: #f6f6f6; stroke: #8a8f98; stroke-width: 1.5; stroke-dasharray: 5 4 }
  .group { fill: #8a8f98; fill-opacity: .07; stroke: #8a8f98; stroke-opacity: .6 }
  .when { fill: #b07d2b; fill-opacity: .08; stroke: #b07d2b; stroke-dasharray: 3 4 }
  .edge { stroke: #8a8f98; stroke-width: 1.5; fill: none; marker-end: url(#tip) }
  text { font: 13px ui-sans-serif, system-ui, sans-serif; fill: #1c2430; text-anchor: middle }
  .note { font-size: 11px; fill: #6a7280 }
  .title { font-size: 12px; fill: #6a7280; text-anchor: start }
  @media (prefers-color-scheme: dark) {
    .step { fill: #1d2a3d } .exit { fill: #24282e }
    text { fill: #e7ebf1 } .note, .title { fill: #9aa3b0 }
  }
"""


@dataclass(frozen=True)
class Drawn:
    """A step or group: its size, and where in it what it holds stands."""

    node: Node
    width: int
    height: int
    inner: tuple[tuple[int, int, "Drawn"], ...] = ()


def svg(compiled: Path) -> str:
    """The picture, a column for each step of the longest chain; needs nothing from elsewhere.

    Raises:
        InputError: the file is no compiled pipeline.
    """
    placed, width, height = _arranged(nodes(compiled))
    shapes = _shapes(placed, MARGIN, MARGIN)
    width, height = width + 2 * MARGIN, height + 2 * MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" '
        f'aria-label="Steps of {escape(compiled.stem)}">\n'
        f"<style>{STYLE}</style>\n"
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="#8a8f98"/></marker></defs>\n'
        + "\n".join(shapes)
        + "\n</svg>\n"
    )


def _arranged(level: tuple[Node, ...]) -> tuple[tuple[tuple[int, int, Drawn], ...], int, int]:
    """Left to right by dependency, each column around the middle; with width and height of all."""
    column: dict[str, int] = {}
    for node in level:
        column[node.name] = max((column[name] + 1 for name in node.after), default=0)
    columns: list[list[Drawn]] = [[] for _ in range(max(column.values(), default=-1) + 1)]
    for node in level:
        columns[column[node.name]].append(_drawn(node))
    heights = [sum(one.height for one in each) + BESIDE * (len(each) - 1) for each in columns]
    placed, x = [], 0
    for each, height in zip(columns, heights, strict=True):
        y = (max(heights) - height) // 2
        for one in each:
            placed.append((x, y, one))
            y += one.height + BESIDE
        x += max(one.width for one in each) + GAP
    return tuple(placed), x - GAP, max(heights, default=0)


def _drawn(node: Node) -> Drawn:
    if not node.inner:
        head, below = _two_lines(node)
        wide = round(max(len(head) * LETTER, len(below) * SMALL_LETTER))
        return Drawn(node, max(wide + 16, 64), HEIGHT)
    wide = round(len(node.title) * LETTER)
    inner, width, height = _arranged(node.inner)
    left = INSIDE + max(0, wide - width) // 2
    moved = tuple((left + x, y + TITLE, one) for x, y, one in inner)
    return Drawn(node, max(width, wide) + 2 * INSIDE, height + TITLE + INSIDE, moved)


def _shapes(placed: tuple[tuple[int, int, Drawn], ...], left: int, top: int) -> list[str]:
    at = {one.node.name: (left + x, top + y, one) for x, y, one in placed}
    edges = [_edge(at[name], here) for here in at.values() for name in here[2].node.after]
    boxes: list[str] = []
    for x, y, one in at.values():
        boxes += _group(x, y, one) if one.inner else _step(x, y, one)
    return edges + boxes


def _group(x: int, y: int, drawn: Drawn) -> list[str]:
    kind = "when" if drawn.node.note else "group"
    return [
        f'<rect class="{kind}" x="{x}" y="{y}" width="{drawn.width}" height="{drawn.height}" '
        'rx="11"/>',
        f'<text class="title" x="{x + INSIDE}" y="{y + 18}">{escape(drawn.node.title)}</text>',
        *_shapes(drawn.inner, x, y),
    ]


def _step(x: int, y: int, drawn: Drawn) -> list[str]:
    (head, below), middle = _two_lines(drawn.node), x + drawn.width // 2
    kind, line = "exit" if drawn.node.note else "step", y + (19 if below else HEIGHT // 2 + 4)
    shapes = [
        f'<rect class="{kind}" x="{x}" y="{y}" width="{drawn.width}" height="{HEIGHT}" rx="8"/>',
        f'<text x="{middle}" y="{line}">{escape(head)}</text>',
    ]
    if below:
        shapes.append(f'<text class="note" x="{middle}" y="{y + 35}">{escape(below)}</text>')
    return shapes


def _two_lines(node: Node) -> tuple[str, str]:
    """What a step is called, and below it what a display name such as `gate: good enough?` adds."""
    if not node.label.startswith(f"{node.name}: "):
        return node.label, node.note
    return node.name, node.note or node.label.removeprefix(f"{node.name}: ")


def _edge(start: tuple[int, int, Drawn], end: tuple[int, int, Drawn]) -> str:
    """Level to the end of the columns before, then to where it leads."""
    x1, y1 = start[0] + start[2].width, start[1] + start[2].height // 2
    x2, y2 = end[0] - 2, end[1] + end[2].height // 2
    bend = end[0] - GAP
    curve = f"C{bend + 16} {y1} {x2 - 16} {y2} {x2} {y2}"
    return f'<path class="edge" d="M{x1} {y1}H{bend}{curve}"/>'
