"""The steps of a run: tasks, groups and iterations, from the nodes that a KFP server lists.

A server lists every node of the Argo workflow: for each task a driver, a wrapper and an executor,
and for each of these its attempts. A node names its children by their ids only, and an id is a
hash of the node's full name. So names are tried from the root down until the ids match. The
Workflow itself has the tree, but many users may read only the KFP API.
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
"""Nodes of a loop that are not iterations."""
HOOK = ".onExit"
MOST_ATTEMPTS = 20


@dataclass(frozen=True)
class Step:
    """A task of a pipeline, a group of tasks, or an iteration of a loop."""

    name: str
    """In the pipeline, such as train or exit-handler-1."""
    title: str
    """The display name if the pipeline's spec is known, else the name."""
    state: str
    """PENDING, RUNNING, SUCCEEDED, CACHED, FAILED, SKIPPED by a condition, CANCELED, or OMITTED
    if it never started because another step failed."""
    start: datetime | None = None
    end: datetime | None = None
    pods: tuple[str, ...] = ()
    """Argo's ids of its pods, newest last; an id and the pod's name end with the same number."""
    driver: str = ""
    """Argo's id of its driver's pod."""
    by_driver: bool = False
    """True if the state is that of its driver."""
    steps: tuple["Step", ...] = ()
    """The content of a group or a loop."""

    def walk(self) -> Iterator["Step"]:
        """Yield the step and all steps below it, from the top down."""
        yield self
        for step in self.steps:
            yield from step.walk()


@dataclass(frozen=True)
class Leaf:
    """A step that runs a program, with names that are unique also in loops."""

    step: Step
    label: str
    """For input, such as 0/train."""
    title: str
    """For output, such as trials/0/train."""


@dataclass
class _Node:
    """A node of the workflow with its attempts."""

    name: str
    display: str
    attempts: dict[int, "V2beta1PipelineTaskDetail"] = field(default_factory=dict)
    """By number; -1 is the node itself."""
    children: dict[str, "_Node"] = field(default_factory=dict)


def steps_of(run: "V2beta1Run", spec: Mapping[str, Any] | None = None) -> tuple[Step, ...]:
    """Return the steps of a run, in the order in which they run.

    Args:
        run: With its details.
        spec: The pipeline's spec, for display names and steps that have not started; by default
            the run's own.
    """
    details = (run.run_details and run.run_details.task_details) or []
    root = _root(details)
    steps = _steps_in(root.children["root"], _workflow(details)) if root else []
    over = (run.state or "") in OVER
    steps = [_final(step) for step in steps] if over else steps
    graph = graph_of(spec or run.pipeline_spec)
    return tuple(_with_spec(steps, graph, "root", over)) if "root" in graph else tuple(steps)


def every_step(steps: Sequence[Step]) -> list[Step]:
    """Return all steps of a tree, from the top down."""
    return [one for step in steps for one in step.walk()]


def leaves(steps: Sequence[Step], label: str = "", title: str = "") -> Iterator[Leaf]:
    """Yield the steps that are not groups, with the prefixes `label` and `title`."""
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
    """Return the tree as JSON."""
    return [
        {
            "name": step.name,
            "title": step.title,
            "state": step.state,
            "start": step.start and step.start.isoformat(),
            "end": step.end and step.end.isoformat(),
            **({"progress": line} if (line := progress(step)) else {}),
            **({"steps": documents(step.steps, progress)} if step.steps else {}),
        }
        for step in steps
    ]


def node_id(workflow: str, name: str) -> str:
    """Return the id of an Argo node."""
    return f"{workflow}-{_hash(name)}"


def _hash(text: str, value: int = 0x811C9DC5) -> int:
    """FNV-1a of 32 bits; `value` is the hash of the text before this one."""
    for byte in text.encode():
        value = ((value ^ byte) * 0x01000193) & 0xFFFFFFFF
    return value


def _ids(detail: "V2beta1PipelineTaskDetail") -> list[str]:
    return [child.pod_name for child in detail.child_tasks or [] if child.pod_name]


def _workflow(details: Sequence["V2beta1PipelineTaskDetail"]) -> str:
    return next((one.rpartition("-")[0] for detail in details for one in _ids(detail)), "")


def _root(details: Sequence["V2beta1PipelineTaskDetail"]) -> _Node | None:
    """Return the tree of the workflow's nodes, or None before the pipeline's root has started."""
    workflow = _workflow(details)
    numbers = (one.rpartition("-")[2] for detail in details for one in _ids(detail))
    listed = {int(number) for number in numbers if number.isdigit()}
    names = {detail.display_name for detail in details}
    suffixes = {attempt[0] for name in names if (attempt := ATTEMPT.search(name))}
    displays = sorted({ATTEMPT.sub("", name) for name in names} - {workflow})
    root = _Node(workflow, workflow)
    nodes, frontier = {workflow: root}, [root]
    while frontier:
        parent = frontier.pop()
        for form in (*sorted(suffixes, reverse=True), ""):  # the last attempt first
            prefix = _hash(f"{parent.name}{form}.")
            for display in displays:
                if display in parent.children:
                    continue
                own = _hash(display, prefix)
                if listed & {own, *(_hash(suffix, own) for suffix in suffixes)}:
                    name = f"{parent.name}{form}.{display}"
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
    """Assign each detail to its node: by its children, else by its start time."""
    names = {node_id(workflow, name + s): name for name in nodes for s in ("", *suffixes)}
    by_display: dict[str, list[_Node]] = {}
    for node in nodes.values():
        by_display.setdefault(node.display, []).append(node)
    for detail in sorted(details, key=lambda one: (not one.child_tasks, one.display_name)):
        candidates = by_display.get(ATTEMPT.sub("", detail.display_name), [])
        children = [names[one] for one in _ids(detail) if one in names]
        number = _attempt(detail)
        if children:
            own = [node for node in candidates if any(_leads(node, child) for child in children)]
        else:
            own = [node for node in candidates if _is_attempt(node, detail)]
            own = own or [node for node in candidates if not node.attempts and number < 0]
        if own:
            own[0].attempts[number] = detail


def _leads(node: _Node, child: str) -> bool:
    """Return whether the child is in this node, or follows it."""
    return child.startswith(node.name) or child.rpartition(".")[0] == node.name.rpartition(".")[0]


def _is_attempt(node: _Node, detail: "V2beta1PipelineTaskDetail") -> bool:
    """Return whether this is an attempt of the node, by their start times."""
    own, number = node.attempts.get(-1), _attempt(detail)
    if own is None or number < 0 or number in node.attempts:
        return False
    if number == 0:
        return bool(own.start_time == detail.start_time)
    before = node.attempts.get(number - 1)
    return before is not None and before.end_time <= detail.start_time


def _steps_in(group: _Node, workflow: str) -> list[Step]:
    """Return the steps in a group, by their start."""
    steps: list[Step] = []
    for display, node in group.children.items():
        if display in OF_A_LOOP:
            continue
        if display.endswith(HOOK):
            steps += _steps_in(node, workflow)
        elif iteration := ITERATION.match(display):
            steps += [
                replace(step, name=iteration[1], title=iteration[1])
                for step in _steps_in(node, workflow)
            ]
        elif display.endswith("-driver"):
            name = display.removesuffix("-driver")
            if name not in group.children:
                steps.append(_step(name, None, node, workflow))
        else:
            steps.append(_step(display, node, group.children.get(f"{display}-driver"), workflow))
    return sorted(steps, key=lambda step: (step.start is None, step.start, step.name))


def _step(name: str, node: _Node | None, driver: _Node | None, workflow: str) -> Step:
    """Return the step of a task from its node and its driver's."""
    driver_state = _state(driver) if driver else ""
    by_driver = bool(driver) and (node is None or driver_state in ("FAILED", "RUNNING", "PENDING"))
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
        steps=() if executor or not node else tuple(_steps_in(node, workflow)),
    )


def _final(step: Step) -> Step:
    """Return a step of a run that is over: steps that have not started are omitted."""
    inner = tuple(_final(one) for one in step.steps)
    return replace(step, state=step.state if step.state in OVER else "OMITTED", steps=inner)


def _state(node: _Node) -> str:
    """Return the state of a node; while it runs, that of its last attempt."""
    if not node.attempts:
        return "PENDING"
    chosen = node.attempts[min(node.attempts)]
    if chosen.state == "RUNNING":
        chosen = node.attempts[max(node.attempts)]
    return "OMITTED" if chosen.state in (None, "RUNTIME_STATE_UNSPECIFIED") else str(chosen.state)


def _attempt(detail: "V2beta1PipelineTaskDetail") -> int:
    attempt = ATTEMPT.search(detail.display_name)
    return int(attempt[1]) if attempt else -1


def _times(node: _Node) -> tuple[datetime | None, datetime | None]:
    if not node.attempts:
        return None, None
    first = node.attempts[min(node.attempts)]
    return first.start_time, first.end_time


def _pods(node: _Node, workflow: str) -> tuple[str, ...]:
    """Return the ids of a node's attempts, or its own id if it has no attempts."""
    own = node.attempts.get(-1)
    tried = {node_id(workflow, f"{node.name}({number})") for number in range(MOST_ATTEMPTS)}
    listed = [one for one in _ids(own) if one in tried] if own else []
    return tuple(listed) or (node_id(workflow, node.name),)


def _with_spec(
    steps: Sequence[Step], spec: Mapping[str, Any], component: str, over: bool
) -> Iterator[Step]:
    """Yield the tasks of a component: known steps with their titles, and those not started."""
    root = spec["root"] if component == "root" else spec["components"].get(component, {})
    tasks = root.get("dag", {}).get("tasks", {})
    known = {step.name: step for step in steps}
    waiting = "OMITTED" if over else "PENDING"
    for name in _in_order(tasks):
        step = known.pop(name, None) or Step(name, name, waiting)
        title = tasks[name].get("taskInfo", {}).get("name") or name
        title = name if title.startswith(f"{name}: ") else title  # "name: details" is for the UI
        inner = tasks[name].get("componentRef", {}).get("name", "")
        if "parameterIterator" in tasks[name] or "artifactIterator" in tasks[name]:
            inside = tuple(
                replace(one, steps=tuple(_with_spec(one.steps, spec, inner, one.state in OVER)))
                for one in step.steps
            )
        else:
            ended = over or step.state in OVER
            inside = tuple(_with_spec(step.steps, spec, inner, ended))
        yield replace(step, title=title, steps=inside)
    yield from known.values()


def _in_order(tasks: Mapping[str, Any]) -> list[str]:
    """Return the names of tasks in topological order."""
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
