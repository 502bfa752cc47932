"""The Mermaid flowchart of a compiled pipeline, for the README."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

from kfp_ddp.pipelines import document


@dataclass(frozen=True)
class Node:
    """A task, or a group with the tasks in it."""

    name: str
    """Unique in its group; `after` refers to it."""
    label: str
    """Display name in the KFP UI."""
    after: tuple[str, ...]
    """Direct dependencies in the same group, without the transitive ones."""
    note: str = ""
    """Condition, such as `if gate-Output == true`."""
    on_exit: bool = False
    inner: tuple["Node", ...] = ()

    @property
    def title(self) -> str:
        """Label and note, without names that the compiler generated."""
        if re.fullmatch(r"condition-\d+", self.label):
            return self.note
        if self.note.startswith("if "):
            return f"if {self.label}"
        return ", ".join(filter(None, (self.label, self.note)))


def mermaid(file: Path) -> str:
    """Return the flowchart of a compiled pipeline without loops; groups are subgraphs."""
    return "\n".join(["flowchart LR", *_flowchart(nodes(file), "n", "  ")]) + "\n"


def nodes(file: Path) -> tuple[Node, ...]:
    """Return the tasks of a compiled pipeline in order."""
    spec = document.read(file).spec
    return _group(spec["root"]["dag"]["tasks"], spec["components"])


def _group(tasks: Mapping[str, Any], components: Mapping[str, Any]) -> tuple[Node, ...]:
    needed = {name: _dependencies(task) & set(tasks) for name, task in tasks.items()}
    before: dict[str, set[str]] = {}
    result = []
    order = TopologicalSorter({name: sorted(needed[name]) for name in tasks})  # sets have no order
    for name in order.static_order():
        indirect = {ancestor for one in needed[name] for ancestor in before[one]}
        before[name] = indirect | needed[name]
        direct = tuple(one for one in tasks if one in needed[name] - indirect)
        result.append(_node(name, tasks[name], direct, components))
    return tuple(result)


def _dependencies(task: Mapping[str, Any]) -> set[str]:
    inputs = task.get("inputs", {})
    sources = [*inputs.get("parameters", {}).values(), *inputs.get("artifacts", {}).values()]
    outputs = [inner for source in sources for inner in source.values() if isinstance(inner, dict)]
    producers = {output["producerTask"] for output in outputs if "producerTask" in output}
    return producers | set(task.get("dependentTasks", []))


def _node(
    name: str,
    task: Mapping[str, Any],
    after: tuple[str, ...],
    components: Mapping[str, Any],
) -> Node:
    dag = components[task["componentRef"]["name"]].get("dag")
    inner = _group(dag["tasks"], components) if dag else ()
    trigger = task.get("triggerPolicy", {})
    on_exit = trigger.get("strategy") == "ALL_UPSTREAM_TASKS_COMPLETED"
    label = str(task.get("taskInfo", {}).get("name") or name)
    notes = [_condition(trigger.get("condition", "")), "always" * on_exit]
    return Node(name, label, after, ", ".join(filter(None, notes)), on_exit, inner)


def _condition(text: str) -> str:
    """Return a condition as text."""
    plain = re.sub(r"inputs\.parameter_values\['(?:pipelinechannel--)?([^']*)'\]", r"\1", text)
    return f"if {plain}" if plain else ""


def _flowchart(level: tuple[Node, ...], prefix: str, indent: str) -> Iterator[str]:
    ids = {node.name: f"{prefix}{number}" for number, node in enumerate(level)}
    for node in level:
        own = ids[node.name]
        # Mermaid's entities begin with #.
        title = re.sub(r"[^\w .,:()-]", lambda match: f"#{ord(match[0])};", node.title)
        if node.inner:
            yield f'{indent}subgraph {own}["{title}"]'
            yield from _flowchart(node.inner, f"{own}_", f"{indent}  ")
            yield f"{indent}end"
        else:
            yield f'{indent}{own}(["{title}"])' if node.on_exit else f'{indent}{own}["{title}"]'
    for node in level:
        for before in node.after:
            yield f"{indent}{ids[before]} {'-.->' if node.on_exit else '-->'} {ids[node.name]}"
