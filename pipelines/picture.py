"""Draw a compiled pipeline as an SVG: its steps, what depends on what, conditions, exit handler."""

from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import yaml

WIDTH, HEIGHT, GAP, MARGIN = 124, 44, 34, 28
STYLE = """
  .step { fill: #eef3fb; stroke: #3a6fb5; stroke-width: 1.5 }
  .exit { fill: #f6f6f6; stroke: #8a8f98; stroke-width: 1.5; stroke-dasharray: 5 4 }
  .group { fill: none; stroke: #b07d2b; stroke-dasharray: 3 4 }
  .edge { stroke: #8a8f98; stroke-width: 1.5; fill: none; marker-end: url(#tip) }
  text { font: 13px ui-sans-serif, system-ui, sans-serif; fill: #1c2430; text-anchor: middle }
  .note { font-size: 11px; fill: #6a7280 }
  @media (prefers-color-scheme: dark) {
    .step { fill: #1d2a3d } .exit { fill: #24282e }
    text { fill: #e7ebf1 } .note { fill: #9aa3b0 }
  }
"""


@dataclass(frozen=True)
class Step:
    """One task of the flattened pipeline; `condition` names the If group it stands in."""

    name: str
    after: tuple[str, ...]
    condition: str = ""
    on_exit: bool = False


def steps(compiled: Path) -> list[Step]:
    """The tasks of a compiled pipeline, groups opened, in an order that follows dependencies."""
    document = next(yaml.safe_load_all(compiled.read_text()))
    return _order(_flatten(document["root"]["dag"]["tasks"], document["components"], (), ""))


def svg(compiled: Path) -> str:
    """The picture, a column for each step of the longest chain; needs nothing from elsewhere."""
    drawn = steps(compiled)
    column: dict[str, int] = {}
    row: dict[str, int] = {}
    for step in drawn:
        column[step.name] = max((column[name] + 1 for name in step.after), default=0)
        row[step.name] = 1 if step.on_exit else list(column.values()).count(column[step.name]) - 1
    last = max(column[step.name] for step in drawn if not step.on_exit)
    column |= {step.name: last for step in drawn if step.on_exit}
    corner = {
        name: (MARGIN + column[name] * (WIDTH + GAP), MARGIN + row[name] * (HEIGHT + GAP))
        for name in column
    }
    width = MARGIN * 2 + (last + 1) * WIDTH + last * GAP
    height = MARGIN * 2 + (max(row.values()) + 1) * HEIGHT + max(row.values()) * GAP
    shapes = [_edge(corner[name], corner[step.name]) for step in drawn for name in step.after]
    shapes += [_box(step, *corner[step.name]) for step in drawn]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-label="Steps of {compiled.stem}">\n'
        f"<style>{STYLE}</style>\n"
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="#8a8f98"/></marker></defs>\n'
        + "\n".join(shapes)
        + "\n</svg>\n"
    )


def _flatten(
    tasks: dict[str, Any], components: dict[str, Any], before: tuple[str, ...], condition: str
) -> list[Step]:
    found = []
    for name, task in tasks.items():
        after = tuple(task.get("dependentTasks", [])) or before
        trigger = task.get("triggerPolicy", {})
        inner = components[task["componentRef"]["name"]].get("dag")
        if inner is None:
            on_exit = trigger.get("strategy") == "ALL_UPSTREAM_TASKS_COMPLETED"
            found.append(Step(name, after, condition, on_exit))
        else:
            label = task["taskInfo"]["name"] if "condition" in trigger else condition
            found += _flatten(inner["tasks"], components, after, label)
    return found


def _order(found: list[Step]) -> list[Step]:
    """Sort by dependency; edges to groups, and those that a longer way shows, are left out."""
    names = {step.name for step in found}
    ancestors: dict[str, set[str]] = {}
    ordered: list[Step] = []
    waiting = [
        Step(s.name, tuple(n for n in s.after if n in names), s.condition, s.on_exit) for s in found
    ]
    while waiting:
        step = next(s for s in waiting if all(name in ancestors for name in s.after))
        waiting.remove(step)
        indirect = set().union(*(ancestors[name] for name in step.after))
        ancestors[step.name] = indirect | set(step.after)
        direct = tuple(name for name in step.after if name not in indirect)
        ordered.append(Step(step.name, direct, step.condition, step.on_exit))
    return ordered


def _box(step: Step, x: int, y: int) -> str:
    note = "on exit, always" if step.on_exit else f"if {step.condition}" if step.condition else ""
    middle = x + WIDTH // 2
    shapes = [
        f'<rect class="{"exit" if step.on_exit else "step"}" x="{x}" y="{y}" '
        f'width="{WIDTH}" height="{HEIGHT}" rx="8"/>',
        f'<text x="{middle}" y="{y + HEIGHT // 2 + 4}">{escape(step.name)}</text>',
    ]
    if step.condition:
        shapes.append(
            f'<rect class="group" x="{x - 7}" y="{y - 7}" width="{WIDTH + 14}" '
            f'height="{HEIGHT + 14}" rx="11"/>'
        )
    if note:
        shapes.append(f'<text class="note" x="{middle}" y="{y - 11}">{escape(note)}</text>')
    return "\n".join(shapes)


def _edge(start: tuple[int, int], end: tuple[int, int]) -> str:
    x1, y1 = start[0] + WIDTH, start[1] + HEIGHT // 2
    x2, y2 = end[0] - 9, end[1] + HEIGHT // 2
    return f'<path class="edge" d="M{x1} {y1}C{x1 + 18} {y1} {x2 - 18} {y2} {x2} {y2}"/>'
