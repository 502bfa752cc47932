"""The steps of any compiled pipeline as a person means them: groups, loops, conditions, edges."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kfp_ddp.core.errors import InputError
from kfp_ddp.pipelines import document

DEEPEST = 20


@dataclass(frozen=True)
class Node:
    """A step, or a group of them with what is in it."""

    name: str
    """Unique beside it; what `after` names."""
    label: str
    """As the UI of KFP has it."""
    after: tuple[str, ...]
    """Those beside it that it waits for; what they wait for themselves is left out."""
    note: str = ""
    """When, or how often: if gate-Output == true, for each of 3."""
    on_exit: bool = False
    inner: tuple["Node", ...] = ()

    @property
    def title(self) -> str:
        """What it is and when, without names that only the compiler made."""
        made = re.fullmatch(r"(condition|for-loop)-\d+", self.label)
        if made and self.note:
            return self.note
        if self.note.startswith("if "):
            return f"if {self.label}"
        label = re.sub(r"^condition-branches-\d+$", "one of", self.label)
        return ", ".join(filter(None, (label, self.note)))


def nodes(file: Path) -> tuple[Node, ...]:
    """What a compiled pipeline does, in an order that follows dependencies.

    Raises:
        InputError: the file is no compiled pipeline.
    """
    spec = document.read(file).spec
    try:
        return _level(spec["root"]["dag"]["tasks"], spec.get("components", {}), DEEPEST)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise InputError(
            f"{file} is no pipeline that can be drawn ({type(error).__name__}: {error}); "
            "compile it again"
        ) from None


def _level(
    tasks: Mapping[str, Any], components: Mapping[str, Any], deepest: int
) -> tuple[Node, ...]:
    """Those that stand beside each other."""
    if not deepest:
        raise ValueError("groups in groups without end")
    waiting = {name: _needed(task) & set(tasks) for name, task in tasks.items()}
    before: dict[str, set[str]] = {}
    found = []
    while waiting:
        ready = [name for name, needed in waiting.items() if needed <= set(before)]
        name = ready[0]  # an IndexError where they wait for each other
        needed = waiting.pop(name)
        indirect = {each for one in needed for each in before[one]}
        before[name] = indirect | needed
        direct = tuple(each for each in tasks if each in needed - indirect)
        found.append(_node(name, tasks[name], direct, components, deepest))
    return tuple(found)


def _needed(task: Mapping[str, Any]) -> set[str]:
    inputs = task.get("inputs", {})
    sources = [*inputs.get("parameters", {}).values(), *inputs.get("artifacts", {}).values()]
    outputs = [inner for source in sources for inner in source.values() if isinstance(inner, dict)]
    producers = {each["producerTask"] for each in outputs if "producerTask" in each}
    return producers | set(task.get("dependentTasks", []))


def _node(
    name: str,
    task: Mapping[str, Any],
    after: tuple[str, ...],
    components: Mapping[str, Any],
    deepest: int,
) -> Node:
    dag = components[task["componentRef"]["name"]].get("dag")
    inner = _level(dag["tasks"], components, deepest - 1) if dag else ()
    trigger = task.get("triggerPolicy", {})
    on_exit = trigger.get("strategy") == "ALL_UPSTREAM_TASKS_COMPLETED"
    label = str(task.get("taskInfo", {}).get("name") or name)
    notes = [_condition(trigger.get("condition", "")), _loop(task), "always" * on_exit]
    return Node(name, label, after, ", ".join(filter(None, notes)), on_exit, inner)


def _condition(text: str) -> str:
    """`else` stands for all that those before it have refused."""
    if not text:
        return ""
    said = re.sub(r"inputs\.parameter_values\['(?:pipelinechannel--)?([^']*)'\]", r"\1", text)
    own = [part for part in said.split(" && ") if not part.startswith("!(")]
    later = "else " if said.startswith("!(") else ""
    return f"{later}if {' && '.join(own)}" if own else "else"


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
