"""The steps of a run: tasks, groups and iterations, from the nodes of its Argo Workflow.

The Workflow has for each task a driver, a wrapper and an executor, and for each of these its
attempts. Without the Workflow, the KFP API lists the same nodes by their display names: then all
iterations of a loop are one step, and of a large Workflow some nodes are missing.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from graphlib import TopologicalSorter
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from kfp_ddp.client.kfp.pipelines import graph_of
from kfp_ddp.client.kfp.runs import cancelled_at
from kfp_ddp.k8s.api import Object

if TYPE_CHECKING:
    from kfp_server_api import V2beta1PipelineTaskDetail, V2beta1Run

UNKNOWN = "UNKNOWN"
ENDED = frozenset({"SUCCEEDED", "CACHED", "SKIPPED", "FAILED", "CANCELED", "OMITTED"})
OVER = ENDED | {UNKNOWN}
"""States that do not change any more."""
ATTEMPT = re.compile(r"\((\d+)\)$")
ITERATION = re.compile(r"^iteration-iterations\((\d+):.*\)$")
OF_A_LOOP = ("iteration-driver", "iteration-iterations")
"""Nodes of a loop that are not iterations."""
GROUP = re.compile(r"root|iteration(-item)?|(exit-handler|condition(-branches)?|for-loop)-\d+")
"""Names of what is not a task of a pipeline whose spec is not known."""
EXECUTED = [f".executor({number})" for number in range(10)]
BELOW = [f"({number}){end}" for number in range(3) for end in ("", ".executor", *EXECUTED)]
"""Ends of the names of a task's own nodes."""
HOOK = ".onExit"
DRIVER = "-driver"
URGENT = {"FAILED": 0, "RUNNING": 1, "PENDING": 2, "SUCCEEDED": 3}
"""Which state of several iterations is shown: the one of the lowest number."""
STATES = {"Error": "FAILED", "": "PENDING", "RUNTIME_STATE_UNSPECIFIED": "OMITTED"}


@dataclass(frozen=True)
class Step:
    """A task of a pipeline, a group of tasks, or an iteration of a loop."""

    name: str
    """In the pipeline, such as train or exit-handler-1."""
    title: str
    """The display name if the pipeline's spec is known, else the name."""
    state: str
    """PENDING, RUNNING, SUCCEEDED, CACHED, FAILED, SKIPPED by a condition, CANCELED, OMITTED if it
    never started because another step failed, or UNKNOWN if KFP lost it and the run is over."""
    start: datetime | None = None
    end: datetime | None = None
    pods: tuple[str, ...] = ()
    """Argo's ids of its pods, newest last; empty without the Workflow."""
    driver: str = ""
    """Argo's id of its driver's pod; '' without the Workflow."""
    nodes: tuple[tuple[str, ...], ...] = ()
    """For each iteration the ids by which KFP may know the pod of this state, the likeliest last;
    without the Workflow all iterations of a loop are one step."""
    by_driver: bool = False
    """True if the state is that of its driver."""
    steps: tuple["Step", ...] = ()
    """The content of a group or a loop."""


@dataclass(frozen=True)
class Leaf:
    """A step that runs a program, with names that are unique also in loops."""

    step: Step
    label: str
    """For input, such as 0/train."""
    title: str
    """For output, such as trials/0/train."""


class _Attempt(NamedTuple):
    """An attempt of a node; number -1 is the node itself."""

    id: str
    state: str
    start: datetime | None
    end: datetime | None


@dataclass
class _Node:
    attempts: dict[int, _Attempt] = field(default_factory=dict)
    children: dict[str, "_Node"] = field(default_factory=dict)


def steps_of(
    run: "V2beta1Run", spec: Mapping[str, Any] | None = None, nodes: Sequence[Object] = ()
) -> tuple[Step, ...]:
    """Return the steps of a run, in the order in which they run.

    The spec, by default the run's own, has display names and steps that have not started. `nodes`
    are those of its Workflow; empty if it cannot be read.
    """
    graph = graph_of(spec or run.pipeline_spec)
    tasks = _task_names(graph)
    over = run.state in OVER
    missing = "OMITTED" if over else "PENDING"
    if nodes:
        steps = _steps_in(_tree(nodes))
    else:
        details = (run.run_details and run.run_details.task_details) or []
        listed = _by_name(details)
        steps = _listed_steps(listed, _listed_nodes(details), tasks)
        # KFP lost the steps of a run that is over while its root still runs.
        root_runs = "root" in listed and _state(listed["root"]) not in OVER
        if over and root_runs:
            missing = UNKNOWN
    if "root" in graph:
        known = steps
        steps = list(_with_spec(known, graph, "root", missing, flat=not nodes))
        if not nodes:
            steps += [step for step in known if step.name not in tasks]
    since = cancelled_at(run)
    lost = missing if over else ""
    return tuple(_final(step, lost, since) for step in steps)


def every_step(steps: Sequence[Step]) -> list[Step]:
    """Return all steps of a tree, from the top down."""
    below: list[Step] = []
    for step in steps:
        below += [step, *every_step(step.steps)]
    return below


def leaves(steps: Sequence[Step], label: str = "", title: str = "") -> Iterator[Leaf]:
    """Yield the steps that are not groups, with the prefixes `label` and `title`."""
    for step in steps:
        if not step.steps:
            yield Leaf(step, f"{label}{step.name}", f"{title}{step.title}")
            continue
        iteration = step.name.isdigit()
        looped = iteration or any(child.name.isdigit() for child in step.steps)
        yield from leaves(
            step.steps,
            f"{label}{step.name}/" if iteration else label,
            f"{title}{step.title}/" if looped else title,
        )


def documents(steps: Sequence[Step], progress: Callable[[Step], str]) -> list[dict[str, Any]]:
    """Return the tree as JSON."""
    return [_document(step, progress) for step in steps]


def _document(step: Step, progress: Callable[[Step], str]) -> dict[str, Any]:
    document: dict[str, Any] = {
        "name": step.name,
        "title": step.title,
        "state": step.state,
        "start": step.start and step.start.isoformat(),
        "end": step.end and step.end.isoformat(),
    }
    line = progress(step)
    if line:
        document["progress"] = line
    if step.steps:
        document["steps"] = documents(step.steps, progress)
    return document


def _task_names(graph: Mapping[str, Any]) -> set[str]:
    """Return the names of the tasks of a pipeline, also of those in its groups."""
    names: set[str] = set()
    for component in (graph.get("root", {}), *graph.get("components", {}).values()):
        names |= component.get("dag", {}).get("tasks", {}).keys()
    return names


def _tree(nodes: Sequence[Object]) -> _Node:
    """Return the root of a Workflow's nodes, which are put below the nodes that they belong to."""
    groups: dict[str, dict[str, _Node]] = {}
    owners: dict[str, tuple[int, _Node]] = {}
    for node in nodes:
        name, number = _attempt(node["displayName"])
        group = groups.setdefault(node.get("boundaryID", ""), {})
        owner = group.setdefault(name, _Node())
        phase = node.get("phase", "")
        owner.attempts[number] = _Attempt(
            node["id"],
            STATES.get(phase, phase.upper()),
            _moment(node.get("startedAt")),
            _moment(node.get("finishedAt")),
        )
        owners[node["id"]] = (number, owner)
    # The children of the newest attempt come last, and replace those of earlier ones.
    boundaries = sorted(owners.keys() & groups, key=lambda identity: owners[identity][0])
    for boundary in boundaries:
        _, owner = owners[boundary]
        owner.children |= groups[boundary]
    workflow = next(iter(groups.get("", {}).values()), _Node())
    return workflow.children.get("root", _Node())


def _listed_steps(
    listed: Mapping[str, _Node],
    ids: Mapping[tuple[str, bool], tuple[tuple[str, ...], ...]],
    tasks: set[str],
) -> list[Step]:
    """Return the steps of the nodes that the KFP API lists, without groups.

    `ids` are those of their `nodes`, `tasks` the names in the pipeline's spec.
    """
    drivers = {name.removesuffix(DRIVER) for name in listed if name.endswith(DRIVER)}
    names = {name for name in drivers if not GROUP.fullmatch(name)}
    names |= tasks & (drivers | listed.keys())
    steps: list[Step] = []
    for name in names:
        step = _step(name, listed.get(name), listed.get(name + DRIVER))
        steps.append(replace(step, nodes=ids.get((name, step.by_driver), ())))
    return sorted(steps, key=_started)


def _by_name(details: "Sequence[V2beta1PipelineTaskDetail]") -> dict[str, _Node]:
    """Return the nodes that the KFP API lists; of several iterations, that which failed or runs."""
    nodes: dict[str, _Node] = {}
    for detail in sorted(details, key=lambda detail: URGENT.get(detail.state, len(URGENT))):
        name, number = _attempt(detail.display_name)
        state = STATES.get(detail.state or "RUNTIME_STATE_UNSPECIFIED", detail.state)
        attempt = _Attempt("", state, detail.start_time, detail.end_time)
        nodes.setdefault(name, _Node()).attempts.setdefault(number, attempt)
    return nodes


def _attempt(display: str) -> tuple[str, int]:
    """Split a display name such as train(0) into the node's name and the attempt."""
    attempt = ATTEMPT.search(display)
    if attempt is None:
        return display, -1
    return display[: attempt.start()], int(attempt[1])


def _moment(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None


def _steps_in(group: _Node) -> list[Step]:
    """Return the steps of a group's node, in the order in which they started."""
    steps: list[Step] = []
    for display, node in group.children.items():
        if display in OF_A_LOOP:
            continue
        if display.endswith(HOOK):
            steps += _steps_in(node)
        elif iteration := ITERATION.match(display):
            name = iteration[1]
            steps += [replace(step, name=name, title=name) for step in _steps_in(node)]
        elif display.endswith(DRIVER):
            name = display.removesuffix(DRIVER)
            if name not in group.children:  # else it belongs to that step
                steps.append(_step(name, None, node))
        else:
            driver = group.children.get(f"{display}{DRIVER}")
            steps.append(_step(display, node, driver))
    return sorted(steps, key=_started)


def _started(step: Step) -> tuple[Any, ...]:
    """Return a key that sorts by the start; steps without one come last."""
    return step.start is None, step.start, step.name


def _step(name: str, node: _Node | None, driver: _Node | None) -> Step:
    """Return the step of a task's node and its driver's, of which one may be missing."""
    driver_state = _state(driver) if driver else ""
    # Argo has a node for the task of a driver that is not done, or failed: it says nothing yet.
    driver_decides = node is None or driver_state in ("FAILED", "RUNNING", "PENDING")
    by_driver = driver is not None and driver_decides
    chosen = driver if by_driver else node
    assert chosen is not None
    executor = node.children.get("executor") if node else None
    state = _step_state(chosen, executor, by_driver)
    first = chosen.attempts[min(chosen.attempts)]
    return Step(
        name=name,
        title=name,
        state=state,
        start=first.start,
        end=first.end if state in OVER else None,
        pods=_pods(executor) if executor else (),
        nodes=(_ids(driver) if by_driver else _ids(node, executor),),
        driver=_pods(driver)[-1] if driver else "",
        by_driver=by_driver and state != "OMITTED",
        steps=() if executor or not node else tuple(_steps_in(node)),
    )


def _step_state(chosen: _Node, executor: _Node | None, by_driver: bool) -> str:
    """Return the state of a step from the node that decides, and its task's executor."""
    state = _state(chosen)
    if by_driver and state == "SUCCEEDED":
        return "PENDING"  # its task comes next
    if executor is None:
        return state
    inner = _state(executor)
    if inner == "SKIPPED":
        return "CACHED"
    waits = inner == "PENDING" and state == "RUNNING"
    return "PENDING" if waits else state


def _final(step: Step, missing: str, since: datetime | None) -> Step:
    """Return a step of a run that is over, where one that has not ended is `missing` ('' before).

    In a run that is cancelled `since` a time, steps that ended after it were cancelled.
    """
    inner = tuple(_final(child, missing, since) for child in step.steps)
    state = step.state
    ended_after = since is not None and step.end is not None and step.end >= since
    if missing and state not in OVER:
        state = "CANCELED" if since and step.start else missing
    elif state == "FAILED" and ended_after:
        # A group also ends after the time if a step in it failed before.
        failed = any(child.state == "FAILED" for child in inner)
        state = "FAILED" if failed else "CANCELED"
    return replace(step, state=state, steps=inner)


def _state(node: _Node) -> str:
    """Return the state of a node; while it runs, that of its last attempt."""
    first = node.attempts[min(node.attempts)]
    last = node.attempts[max(node.attempts)]
    return last.state if first.state == "RUNNING" else first.state


def _ids(*nodes: _Node | None) -> tuple[str, ...]:
    """Return the ids of nodes and their attempts, each node before its attempts."""
    ids: list[str] = []
    for node in nodes:
        if node:
            ids += [node.attempts[number].id for number in sorted(node.attempts)]
    return tuple(ids)


def _listed_nodes(
    details: "Sequence[V2beta1PipelineTaskDetail]",
) -> dict[tuple[str, bool], tuple[tuple[str, ...], ...]]:
    """Return the `nodes` of steps, and those of drivers, in what the KFP API lists.

    It lists the ids of children: of a driver's pod the node of its task. An id ends with the hash
    of a name, from which that of the task's own nodes follows.
    """
    children: dict[str, list[str]] = {}
    for detail in details:
        children[detail.task_id] = [str(child.pod_name) for child in detail.child_tasks or ()]
    listed = set(chain.from_iterable(children.values()))
    nodes: dict[tuple[str, bool], tuple[tuple[str, ...], ...]] = {}
    for detail in sorted(details, key=lambda detail: str(detail.start_time)):
        name, number = _attempt(detail.display_name)
        if not name.endswith(DRIVER):
            continue
        # Below a driver's node are its attempts, below an attempt is the node of its task.
        key = (name.removesuffix(DRIVER), number < 0)
        for node in children[detail.task_id]:
            ids = (node, *_ids_below(node, listed))
            nodes[key] = (*nodes.get(key, ()), ids)
    return nodes


def _ids_below(node: str, listed: set[str]) -> list[str]:
    """Return the ids of a task's own nodes, of the id of its node and those that KFP lists."""
    workflow, _, state = node.rpartition("-")
    known = (f"{workflow}-{fnv(end, int(state))}" for end in BELOW)
    return [identity for identity in known if identity in listed]


def fnv(text: str, state: int = 2166136261) -> int:
    """Return the hash (FNV-1a, 32 bits) of a text, or of one after another of the hash `state`."""
    for byte in text.encode():
        state = (state ^ byte) * 16777619 & 0xFFFFFFFF
    return state


def _pods(node: _Node) -> tuple[str, ...]:
    """Return the ids of a node's attempts, newest last, or its own id if it has no attempts."""
    attempts = sorted(number for number in node.attempts if number >= 0)
    numbers = attempts or [-1]
    return tuple(node.attempts[number].id for number in numbers)


def _with_spec(
    steps: Sequence[Step], spec: Mapping[str, Any], component: str, missing: str, flat: bool
) -> Iterator[Step]:
    """Yield the tasks of a component: known steps with their titles, and those not started.

    With `flat`, the known steps are those of the whole pipeline.
    """
    content = spec["root"] if component == "root" else spec["components"].get(component, {})
    tasks = content.get("dag", {}).get("tasks", {})
    known = {step.name: step for step in steps}
    for name in _sort_by_dependency(tasks):
        task = tasks[name]
        step = known.pop(name, None) or Step(name, name, missing)
        inner = task.get("componentRef", {}).get("name", "")
        below = "OMITTED" if step.state in ENDED else missing
        is_loop = "parameterIterator" in task or "artifactIterator" in task
        if flat:
            inside = tuple(_with_spec(steps, spec, inner, below, flat))
        elif is_loop:
            inside = tuple(
                replace(
                    iteration, steps=tuple(_with_spec(iteration.steps, spec, inner, below, flat))
                )
                for iteration in step.steps
            )
        else:
            inside = tuple(_with_spec(step.steps, spec, inner, below, flat))
        yield replace(step, title=_title(name, task), steps=inside)
    if not flat:
        yield from known.values()


def _title(name: str, task: Mapping[str, Any]) -> str:
    """Return the display name of a task; "name: details" is for KFP's own pages."""
    title = str(task.get("taskInfo", {}).get("name") or name)
    return name if title.startswith(f"{name}: ") else title


def _sort_by_dependency(tasks: Mapping[str, Any]) -> list[str]:
    before: dict[str, set[str]] = {}
    for name, task in tasks.items():
        before[name] = set(task.get("dependentTasks", ())) & tasks.keys()
    order = TopologicalSorter(before)
    order.prepare()
    ordered: list[str] = []
    while ready := sorted(order.get_ready()):
        ordered += ready
        order.done(*ready)
    return ordered
