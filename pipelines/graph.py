"""The task graph of a compiled pipeline, and its Mermaid flowchart."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

from kfp_ddp.core.errors import InputError
from kfp_ddp.pipelines import document

MAX_DEPTH = 20


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
    """Condition or loop, such as `if gate-Output == true` or `for each of 3`."""
    on_exit: bool = False
    inner: tuple["Node", ...] = ()

    @property
    def title(self) -> str:
        """Label and note, without names that the compiler generated."""
        generated = re.fullmatch(r"(condition|for-loop)-\d+", self.label)
        if generated and self.note:
            return self.note
        if self.note.startswith("if "):
            return f"if {self.label}"
        label = re.sub(r"^condition-branches-\d+$", "one of", self.label)
        return ", ".join(filter(None, (label, self.note)))


def nodes(file: Path) -> tuple[Node, ...]:
    """Return the tasks of a compiled pipeline in order; raises InputError if it is none."""
    spec = document.read(file).spec
    try:
        return _group(spec["root"]["dag"]["tasks"], spec.get("components", {}), MAX_DEPTH)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise InputError(
            f"{file} is not a pipeline that can be drawn ({type(error).__name__}: {error}); "
            "compile it again"
        ) from None


def mermaid(file: Path) -> str:
    """Return a Mermaid flowchart of a compiled pipeline; groups are subgraphs."""
    return "\n".join(["flowchart LR", *_flowchart(nodes(file), "n", "  ")]) + "\n"


def _group(tasks: Mapping[str, Any], components: Mapping[str, Any], depth: int) -> tuple[Node, ...]:
    if not depth:
        raise ValueError("groups are nested without end")
    needed = {name: _dependencies(task) & set(tasks) for name, task in tasks.items()}
    before: dict[str, set[str]] = {}
    result = []
    order = TopologicalSorter({name: sorted(needed[name]) for name in tasks})  # sets have no order
    for name in order.static_order():
        indirect = {ancestor for one in needed[name] for ancestor in before[one]}
        before[name] = indirect | needed[name]
        direct = tuple(one for one in tasks if one in needed[name] - indirect)
        result.append(_node(name, tasks[name], direct, components, depth))
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
    depth: int,
) -> Node:
    dag = components[task["componentRef"]["name"]].get("dag")
    inner = _group(dag["tasks"], components, depth - 1) if dag else ()
    trigger = task.get("triggerPolicy", {})
    on_exit = trigger.get("strategy") == "ALL_UPSTREAM_TASKS_COMPLETED"
    label = str(task.get("taskInfo", {}).get("name") or name)
    notes = [_condition(trigger.get("condition", "")), _loop(task), "always" * on_exit]
    return Node(name, label, after, ", ".join(filter(None, notes)), on_exit, inner)


def _condition(text: str) -> str:
    """Return a condition as text; negated conditions of earlier branches become `else`."""
    if not text:
        return ""
    plain = re.sub(r"inputs\.parameter_values\['(?:pipelinechannel--)?([^']*)'\]", r"\1", text)
    own = [part for part in plain.split(" && ") if not part.startswith("!(")]
    prefix = "else " if plain.startswith("!(") else ""
    return f"{prefix}if {' && '.join(own)}" if own else "else"


def _loop(task: Mapping[str, Any]) -> str:
    iterator = task.get("parameterIterator") or task.get("artifactIterator")
    if not iterator:
        return ""
    items = iterator["items"]
    if "raw" in items:
        many = str(len(json.loads(items["raw"])))
    else:
        many = str(next(iter(items.values()))).removeprefix("pipelinechannel--")
    limit = task.get("iteratorPolicy", {}).get("parallelismLimit")
    return f"for each of {many}" + (f", {limit} at once" if limit else "")


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
