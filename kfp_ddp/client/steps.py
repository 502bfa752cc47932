"""The steps of a run as a person means them, out of the many nodes that a KFP server tells of.

A server lists every node of the Argo workflow: for each task a driver, a wrapper, an executor, and
each of them twice, once for its attempts. A node names its children by their ids alone, and an id
is a hash of the node's whole name: so the names are tried from the root on, and what is found
is folded into a tree of tasks, groups and iterations.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from kfp_ddp.client.pipelines import graph_of

if TYPE_CHECKING:
    from kfp_server_api import V2beta1PipelineTaskDetail, V2beta1Run

OVER = frozenset({"SUCCEEDED", "CACHED", "SKIPPED", "FAILED", "CANCELED", "OMITTED"})
"""States that do not change any more."""
ATTEMPT = re.compile(r"\((\d+)\)$")
ITERATION = re.compile(r"^iteration-iterations\((\d+):.*\)$")
OF_A_LOOP = ("iteration-driver", "iteration-iterations")
"""Nodes of a loop that are none of its iterations."""
HOOK = ".onExit"
MOST_ATTEMPTS = 20


@dataclass(frozen=True)
class Step:
    """A task of a pipeline, a group of tasks, or an iteration of a loop."""

    name: str
    """As the pipeline has it, such as train or exit-handler-1."""
    title: str
    """As people read it: the display name where the pipeline's spec is known, else the name."""
    state: str
    """PENDING, RUNNING, SUCCEEDED, CACHED, FAILED, SKIPPED by a condition, CANCELED, or OMITTED
    where it never began because of another."""
    start: datetime | None = None
    end: datetime | None = None
    pods: tuple[str, ...] = ()
    """Argo's ids of its pods, newest last: the last number of an id ends the pod's name too."""
    driver: str = ""
    """Argo's id of the pod that prepares it."""
    by_driver: bool = False
    """Whether it is its driver that failed, or that still runs."""
    steps: tuple["Step", ...] = ()
    """What a group or a loop holds."""

    def walk(self) -> Iterator["Step"]:
        """Itself and all in it, from the top on."""
        yield self
        for step in self.steps:
            yield from step.walk()


@dataclass(frozen=True)
class Leaf:
    """A step that runs a program, told from its like in the other iterations of a loop."""

    step: Step
    label: str
    """As people type it, such as 0/train."""
    title: str
    """As they read it, such as trials/0/train."""


@dataclass
class _Node:
    """A node of the workflow, with its attempts taken together."""

    name: str
    display: str
    attempts: dict[int, "V2beta1PipelineTaskDetail"] = field(default_factory=dict)
    """By number; its own is -1, and tells of all of them."""
    children: dict[str, "_Node"] = field(default_factory=dict)


def steps_of(run: "V2beta1Run", spec: Mapping[str, Any] | None = None) -> tuple[Step, ...]:
    """The steps of a run, in the order in which they run.

    Args:
        run: As the server tells it, with its details.
        spec: The pipeline's spec, for display names and steps that have not begun; the run's own
            where it has one.
    """
    details = (run.run_details and run.run_details.task_details) or []
    root = _root(details)
    found = _folded(root.children["root"], _workflow(details)) if root else []
    over = (run.state or "") in OVER
    found = [_settled(step) for step in found] if over else found
    known = graph_of(spec or run.pipeline_spec)
    return tuple(_with_spec(found, known, "root", over)) if "root" in known else tuple(found)


def every_step(steps: Sequence[Step]) -> list[Step]:
    """All steps of a tree, from the top on."""
    return [each for step in steps for each in step.walk()]


def leaves(steps: Sequence[Step], label: str = "", title: str = "") -> Iterator[Leaf]:
    """The steps of a tree that are no groups, named below what is given."""
    for step in steps:
        if not step.steps:
            yield Leaf(step, f"{label}{step.name}", f"{title}{step.title}")
            continue
        iteration = step.name.isdigit()
        looped = iteration or any(one.name.isdigit() for one in step.steps)
        yield from leaves(
            step.steps,
            f"{label}{step.name}/" if iteration else label,
            f"{title}{step.title}/" if looped else title,
        )


def documents(
    steps: Sequence[Step], progress: Callable[[Step], str] = lambda _: ""
) -> list[dict[str, Any]]:
    """The tree as JSON has it."""
    return [
        {
            "name": step.name,
            "title": step.title,
            "state": step.state,
            "start": step.start and step.start.isoformat(),
            "end": step.end and step.end.isoformat(),
            **({"progress": said} if (said := progress(step)) else {}),
            **({"steps": documents(step.steps, progress)} if step.steps else {}),
        }
        for step in steps
    ]


def node_id(workflow: str, name: str) -> str:
    """The id that Argo gives to a node."""
    return f"{workflow}-{_hash(name)}"


def _hash(name: str) -> int:
    """FNV-1a of 32 bits."""
    value = 0x811C9DC5
    for byte in name.encode():
        value = ((value ^ byte) * 0x01000193) & 0xFFFFFFFF
    return value


def _ids(detail: "V2beta1PipelineTaskDetail") -> list[str]:
    return [child.pod_name for child in detail.child_tasks or [] if child.pod_name]


def _workflow(details: Sequence["V2beta1PipelineTaskDetail"]) -> str:
    return next((one.rpartition("-")[0] for each in details for one in _ids(each)), "")


def _root(details: Sequence["V2beta1PipelineTaskDetail"]) -> _Node | None:
    """The tree of the workflow's nodes, or None before the root of the pipeline has begun."""
    workflow = _workflow(details)
    listed = {one for each in details for one in _ids(each)}
    tried = {each.display_name: ATTEMPT.search(each.display_name) for each in details}
    suffixes = {found[0] for found in tried.values() if found}
    displays = sorted({ATTEMPT.sub("", display) for display in tried} - {workflow})
    root = _Node(workflow, workflow)
    nodes, frontier = {workflow: root}, [root]
    while frontier:
        parent = frontier.pop()
        for form in (*sorted(suffixes, reverse=True), ""):  # of a node that was repeated, the last
            for display in displays:
                name = f"{parent.name}{form}.{display}"
                ids = {node_id(workflow, name + suffix) for suffix in ("", *suffixes)}
                if ids & listed and display not in parent.children:
                    parent.children[display] = nodes[name] = _Node(name, display)
                    frontier.append(nodes[name])
    _attribute(details, nodes, workflow, suffixes)
    return root if "root" in root.children else None


def _attribute(
    details: Sequence["V2beta1PipelineTaskDetail"],
    nodes: Mapping[str, _Node],
    workflow: str,
    suffixes: set[str],
) -> None:
    """Give each detail to its node: by its children, or else by what began when it did."""
    names = {node_id(workflow, name + s): name for name in nodes for s in ("", *suffixes)}
    by_display: dict[str, list[_Node]] = {}
    for node in nodes.values():
        by_display.setdefault(node.display, []).append(node)
    for detail in sorted(details, key=lambda each: (not each.child_tasks, each.display_name)):
        candidates = by_display.get(ATTEMPT.sub("", detail.display_name), [])
        children = [names[one] for one in _ids(detail) if one in names]
        number = _attempt(detail)
        if children:
            own = [node for node in candidates if any(_leads(node, child) for child in children)]
        else:
            own = [node for node in candidates if _began_with(node, detail)]
            own = own or [node for node in candidates if not node.attempts and number < 0]
        if own:
            own[0].attempts[number] = detail


def _leads(node: _Node, child: str) -> bool:
    """Whether a node of that name is in this one, or comes after it."""
    return child.startswith(node.name) or child.rpartition(".")[0] == node.name.rpartition(".")[0]


def _began_with(node: _Node, detail: "V2beta1PipelineTaskDetail") -> bool:
    """Whether this is an attempt of the node, as far as their starts tell."""
    own, number = node.attempts.get(-1), _attempt(detail)
    if own is None or number < 0 or number in node.attempts:
        return False
    if number == 0:
        return bool(own.start_time == detail.start_time)
    before = node.attempts.get(number - 1)
    return before is not None and before.end_time <= detail.start_time


def _folded(group: _Node, workflow: str) -> list[Step]:
    """The steps in a group, by their start."""
    steps: list[Step] = []
    for display, node in group.children.items():
        if display in OF_A_LOOP:
            continue
        if display.endswith(HOOK):
            steps += _folded(node, workflow)
        elif iteration := ITERATION.match(display):
            steps += [
                replace(step, name=iteration[1], title=iteration[1])
                for step in _folded(node, workflow)
            ]
        elif display.endswith("-driver"):
            name = display.removesuffix("-driver")
            if name not in group.children:
                steps.append(_step(name, None, node, workflow))
        else:
            steps.append(_step(display, node, group.children.get(f"{display}-driver"), workflow))
    return sorted(steps, key=lambda step: (step.start is None, step.start, step.name))


def _step(name: str, node: _Node | None, driver: _Node | None, workflow: str) -> Step:
    """One task, of its own node, which comes after its driver's."""
    driven = _state(driver) if driver else ""
    by_driver = bool(driver) and (node is None or driven in ("FAILED", "RUNNING", "PENDING"))
    chosen = driver if by_driver else node
    assert chosen is not None
    executor = node.children.get("executor") if node else None
    state = _state(chosen)
    if by_driver and state == "SUCCEEDED":
        state = "PENDING"
    elif executor:
        inner = _state(executor)
        if inner == "SKIPPED" or (inner == "PENDING" and state == "RUNNING"):
            state = "CACHED" if inner == "SKIPPED" else inner
    start, end = _times(chosen)
    return Step(
        name=name,
        title=name,
        state=state,
        start=start,
        end=end if state in OVER else None,
        pods=_pods(executor, workflow) if executor else (),
        driver=next(iter(_pods(driver, workflow)), "") if driver else "",
        by_driver=by_driver and state != "OMITTED",
        steps=() if executor or not node else tuple(_folded(node, workflow)),
    )


def _settled(step: Step) -> Step:
    """A step of a run that is over: what had not begun will not."""
    inner = tuple(_settled(one) for one in step.steps)
    return replace(step, state=step.state if step.state in OVER else "OMITTED", steps=inner)


def _state(node: _Node) -> str:
    """What a node came to; while it goes on, its last attempt tells more."""
    if not node.attempts:
        return "PENDING"
    chosen = node.attempts[min(node.attempts)]
    if chosen.state == "RUNNING":
        chosen = node.attempts[max(node.attempts)]
    return "OMITTED" if chosen.state in (None, "RUNTIME_STATE_UNSPECIFIED") else str(chosen.state)


def _attempt(detail: "V2beta1PipelineTaskDetail") -> int:
    found = ATTEMPT.search(detail.display_name)
    return int(found[1]) if found else -1


def _times(node: _Node) -> tuple[datetime | None, datetime | None]:
    if not node.attempts:
        return None, None
    first = node.attempts[min(node.attempts)]
    return first.start_time, first.end_time


def _pods(node: _Node, workflow: str) -> tuple[str, ...]:
    """The ids of a node's attempts, or its own where it is not one that is tried again."""
    own = node.attempts.get(-1)
    tried = {node_id(workflow, f"{node.name}({number})") for number in range(MOST_ATTEMPTS)}
    listed = [one for one in _ids(own) if one in tried] if own else []
    return tuple(listed) or (node_id(workflow, node.name),)


def _with_spec(
    found: Sequence[Step], spec: Mapping[str, Any], component: str, over: bool
) -> Iterator[Step]:
    """The tasks of a component: those found, with their titles, and those yet to begin."""
    root = spec["root"] if component == "root" else spec["components"].get(component, {})
    tasks = root.get("dag", {}).get("tasks", {})
    have = {step.name: step for step in found}
    waiting = "OMITTED" if over else "PENDING"
    for name in _in_order(tasks):
        step = have.pop(name, None) or Step(name, name, waiting)
        title = tasks[name].get("taskInfo", {}).get("name") or name
        title = name if title.startswith(f"{name}: ") else title  # the UI has room for the rest
        inner = tasks[name].get("componentRef", {}).get("name", "")
        if "parameterIterator" in tasks[name] or "artifactIterator" in tasks[name]:
            steps = tuple(
                replace(one, steps=tuple(_with_spec(one.steps, spec, inner, one.state in OVER)))
                for one in step.steps
            )
        else:
            ended = over or step.state in OVER
            steps = tuple(_with_spec(step.steps, spec, inner, ended))
        yield replace(step, title=title, steps=steps)
    yield from have.values()


def _in_order(tasks: Mapping[str, Any]) -> list[str]:
    """Names of tasks, each after those that it waits for."""
    ordered: list[str] = []

    def add(name: str) -> None:
        for before in sorted(tasks[name].get("dependentTasks", ())):
            if before in tasks and before not in ordered:
                add(before)
        if name not in ordered:
            ordered.append(name)

    for name in sorted(tasks):
        add(name)
    return ordered
