"""Draw a compiled pipeline as an SVG: steps, what depends on what, groups, conditions, loops."""

from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import NamedTuple

from kfp_ddp.pipelines.graph import Node, nodes

HEIGHT, GAP, BESIDE, INSIDE, TITLE, MARGIN = 44, 24, 18, 12, 26, 8
WIDEST, BETWEEN_ROWS = 760, 32
"""Pixels: what a page's column shows at its own size, and the road of an arrow to the next row."""
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
    inner: "tuple[Placed, ...]" = ()


class Placed(NamedTuple):
    """Something drawn, with where its left upper corner is, and where its row begins."""

    x: int
    y: int
    row: int
    drawn: Drawn

    def moved(self, x: int, y: int) -> "Placed":
        """The same, so much further to the right and down."""
        return Placed(self.x + x, self.y + y, self.row + y, self.drawn)


def svg(compiled: Path) -> str:
    """The picture, a column for each step of the longest chain, in rows where they are many.

    It needs nothing from elsewhere.

    Raises:
        InputError: the file is no compiled pipeline.
    """
    placed, width, height = _arranged(nodes(compiled))
    shapes = _shapes(tuple(each.moved(MARGIN, MARGIN) for each in placed))
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


def _arranged(level: tuple[Node, ...], depth: int = 0) -> tuple[tuple[Placed, ...], int, int]:
    """Left to right by dependency, each column around its row's middle; with width and height."""
    column: dict[str, int] = {}
    for node in level:
        column[node.name] = max((column[name] + 1 for name in node.after), default=0)
    columns: list[list[Drawn]] = [[] for _ in range(max(column.values(), default=-1) + 1)]
    for node in level:
        columns[column[node.name]].append(_drawn(node, depth))
    placed: list[Placed] = []
    width = top = 0
    for row in _rows(columns, WIDEST - 2 * INSIDE * depth):
        if placed:
            top += BETWEEN_ROWS
        heights = [sum(one.height for one in each) + BESIDE * (len(each) - 1) for each in row]
        x = 0
        for each, height in zip(row, heights, strict=True):
            y = top + (max(heights) - height) // 2
            for one in each:
                placed.append(Placed(x, y, top, one))
                y += one.height + BESIDE
            x += max(one.width for one in each) + GAP
        width, top = max(width, x - GAP), top + max(heights)
    return tuple(placed), width, top


def _rows(columns: list[list[Drawn]], widest: int) -> list[list[list[Drawn]]]:
    """The columns in rows of at most so many pixels, or of one that is wider."""
    rows: list[list[list[Drawn]]] = []
    used = 0
    for column in columns:
        wide = max(one.width for one in column)
        if not rows or used + GAP + wide > widest:
            rows.append([column])
            used = wide
        else:
            rows[-1].append(column)
            used += GAP + wide
    return rows


def _drawn(node: Node, depth: int) -> Drawn:
    if not node.inner:
        head, below = _two_lines(node)
        wide = round(max(len(head) * LETTER, len(below) * SMALL_LETTER))
        return Drawn(node, max(wide + 16, 64), HEIGHT)
    wide = round(len(node.title) * LETTER)
    inner, width, height = _arranged(node.inner, depth + 1)
    left = INSIDE + max(0, wide - width) // 2
    moved = tuple(each.moved(left, TITLE) for each in inner)
    return Drawn(node, max(width, wide) + 2 * INSIDE, height + TITLE + INSIDE, moved)


def _shapes(placed: tuple[Placed, ...]) -> list[str]:
    at = {each.drawn.node.name: each for each in placed}
    edges = [_edge(at[name], here) for here in placed for name in here.drawn.node.after]
    boxes: list[str] = []
    for x, y, _, one in placed:
        boxes += _group(x, y, one) if one.inner else _step(x, y, one)
    return edges + boxes


def _group(x: int, y: int, drawn: Drawn) -> list[str]:
    kind = "when" if drawn.node.note else "group"
    return [
        f'<rect class="{kind}" x="{x}" y="{y}" width="{drawn.width}" height="{drawn.height}" '
        'rx="11"/>',
        f'<text class="title" x="{x + INSIDE}" y="{y + 18}">{escape(drawn.node.title)}</text>',
        *_shapes(tuple(each.moved(x, y) for each in drawn.inner)),
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


def _edge(start: Placed, end: Placed) -> str:
    """Level to the end of the columns before, then to where it leads; or between two rows."""
    x1, y1 = start.x + start.drawn.width, start.y + start.drawn.height // 2
    x2, y2 = end.x - 2, end.y + end.drawn.height // 2
    if start.row != end.row:
        below, between = start.x + start.drawn.width // 2, end.row - BETWEEN_ROWS // 2
        into, y2 = end.x + end.drawn.width // 2, end.y - 2
        bottom = start.y + start.drawn.height
        return f'<path class="edge" d="M{below} {bottom}V{between}H{into}V{y2}"/>'
    bend = end.x - GAP
    curve = f"C{bend + 16} {y1} {x2 - 16} {y2} {x2} {y2}"
    return f'<path class="edge" d="M{x1} {y1}H{bend}{curve}"/>'
