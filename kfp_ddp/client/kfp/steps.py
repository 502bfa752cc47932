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
EXECUTED = [f".executor({at})" for at in range(10)]
BELOW = [f"({at}){end}" for at in range(3) for end in ("", ".executor", *EXECUTED)]
"""Ends of the names of a task's own nodes."""
HOOK, DRIVER = ".onExit", "-driver"
URGENT = {state: at for at, state in enumerate(("FAILED", "RUNNING", "PENDING", "SUCCEEDED"))}
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
    components = (graph.get("root", {}), *graph.get("components", {}).values())
    tasks = {name for one in components for name in one.get("dag", {}).get("tasks", {})}
    over = (run.state or "") in OVER
    missing = "OMITTED" if over else "PENDING"
    if nodes:
        steps = _steps_in(_tree(nodes))
    else:
        details = (run.run_details and run.run_details.task_details) or []
        listed, ids = _by_name(details), _listed_nodes(details)
        drivers = {name.removesuffix(DRIVER) for name in listed if name.endswith(DRIVER)}
        names = {name for name in drivers if not GROUP.fullmatch(name)}
        names |= tasks & (drivers | listed.keys())
        flat = (_step(one, listed.get(one), listed.get(one + DRIVER)) for one in names)
        steps = [replace(one, nodes=ids.get((one.name, one.by_driver), ())) for one in flat]
        steps.sort(key=_started)
        if over and "root" in listed and _state(listed["root"]) not in OVER:
            missing = UNKNOWN
    if "root" in graph:
        others = [step for step in steps if not nodes and step.name not in tasks]
        steps = [*_with_spec(steps, graph, "root", missing, flat=not nodes), *others]
    since = cancelled_at(run)
    return tuple(_final(step, missing if over else "", since) for step in steps)


def every_step(steps: Sequence[Step]) -> list[Step]:
    """Return all steps of a tree, from the top down."""
    return [one for step in steps for one in (step, *every_step(step.steps))]


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


def documents(steps: Sequence[Step], progress: Callable[[Step], str]) -> list[dict[str, Any]]:
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


def _tree(nodes: Sequence[Object]) -> _Node:
    groups: dict[str, dict[str, _Node]] = {}
    owners: dict[str, tuple[int, _Node]] = {}
    for node in nodes:
        name, number = _attempt(node["displayName"])
        own = groups.setdefault(node.get("boundaryID", ""), {}).setdefault(name, _Node())
        own.attempts[number] = _Attempt(
            node["id"],
            STATES.get(phase := node.get("phase", ""), phase.upper()),
            _moment(node.get("startedAt")),
            _moment(node.get("finishedAt")),
        )
        owners[node["id"]] = number, own
    for boundary in sorted(owners.keys() & groups, key=lambda one: owners[one][0]):  # newest last
        owners[boundary][1].children |= groups[boundary]
    workflow = next(iter(groups.get("", {}).values()), _Node())
    return workflow.children.get("root", _Node())


def _by_name(details: "Sequence[V2beta1PipelineTaskDetail]") -> dict[str, _Node]:
    """Return the nodes that the KFP API lists; of several iterations, that which failed or runs."""
    nodes: dict[str, _Node] = {}
    for detail in sorted(details, key=lambda one: URGENT.get(one.state, len(URGENT))):
        name, number = _attempt(detail.display_name)
        state = STATES.get(detail.state or "RUNTIME_STATE_UNSPECIFIED", detail.state)
        attempt = _Attempt("", state, detail.start_time, detail.end_time)
        nodes.setdefault(name, _Node()).attempts.setdefault(number, attempt)
    return nodes


def _attempt(display: str) -> tuple[str, int]:
    """Split a display name such as train(0) into the node's name and the attempt."""
    attempt = ATTEMPT.search(display)
    return (display[: attempt.start()], int(attempt[1])) if attempt else (display, -1)


def _moment(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None


def _steps_in(group: _Node) -> list[Step]:
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
            if name not in group.children:
                steps.append(_step(name, None, node))
        else:
            steps.append(_step(display, node, group.children.get(f"{display}{DRIVER}")))
    return sorted(steps, key=_started)


def _started(step: Step) -> tuple[Any, ...]:
    return step.start is None, step.start, step.name


def _step(name: str, node: _Node | None, driver: _Node | None) -> Step:
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


def _final(step: Step, missing: str, since: datetime | None) -> Step:
    """Return a step of a run that is over, where one that has not ended is `missing` ('' before).

    In a run that is cancelled `since` a time, steps that ended after it were cancelled.
    """
    inner, state = tuple(_final(one, missing, since) for one in step.steps), step.state
    if missing and state not in OVER:
        state = "CANCELED" if since and step.start else missing
    elif state == "FAILED" and since and step.end and step.end >= since:
        state = "FAILED" if any(one.state == "FAILED" for one in inner) else "CANCELED"
    return replace(step, state=state, steps=inner)


def _state(node: _Node) -> str:
    """Return the state of a node; while it runs, that of its last attempt."""
    chosen = node.attempts[min(node.attempts)]
    return (node.attempts[max(node.attempts)] if chosen.state == "RUNNING" else chosen).state


def _ids(*nodes: _Node | None) -> tuple[str, ...]:
    return tuple(one.attempts[at].id for one in nodes if one for at in sorted(one.attempts))


def _listed_nodes(
    details: "Sequence[V2beta1PipelineTaskDetail]",
) -> dict[tuple[str, bool], tuple[tuple[str, ...], ...]]:
    """Return the `nodes` of steps, and those of drivers, in what the KFP API lists.

    It lists the ids of children: of a driver's pod the node of its task. An id ends with the hash
    of a name, from which that of the task's own nodes follows.
    """
    children = {one.task_id: [str(c.pod_name) for c in one.child_tasks or ()] for one in details}
    listed = {child for below in children.values() for child in below}
    nodes: dict[tuple[str, bool], tuple[tuple[str, ...], ...]] = {}
    for detail in sorted(details, key=lambda one: str(one.start_time)):
        name, number = _attempt(detail.display_name)
        if name.endswith(DRIVER):
            key = name.removesuffix(DRIVER), number < 0
            for task in children[detail.task_id]:
                workflow, _, state = task.rpartition("-")
                known = (f"{workflow}-{fnv(end, int(state))}" for end in BELOW)
                ids = task, *(one for one in known if one in listed)
                nodes[key] = (*nodes.get(key, ()), ids)
    return nodes


def fnv(text: str, state: int = 2166136261) -> int:
    """Return the hash (FNV-1a, 32 bits) of a text, or of one after another of the hash `state`."""
    for byte in text.encode():
        state = (state ^ byte) * 16777619 & 0xFFFFFFFF
    return state


def _pods(node: _Node) -> tuple[str, ...]:
    """Return the ids of a node's attempts, newest last, or its own id if it has no attempts."""
    numbers = sorted(number for number in node.attempts if number >= 0) or [-1]
    return tuple(node.attempts[number].id for number in numbers)


def _with_spec(
    steps: Sequence[Step], spec: Mapping[str, Any], component: str, missing: str, flat: bool
) -> Iterator[Step]:
    """Yield the tasks of a component: known steps with their titles, and those not started.

    With `flat`, the known steps are those of the whole pipeline.
    """
    root = spec["root"] if component == "root" else spec["components"].get(component, {})
    tasks = root.get("dag", {}).get("tasks", {})
    known = {step.name: step for step in steps}
    for name in _sort_by_dependency(tasks):
        step = known.pop(name, None) or Step(name, name, missing)
        title = tasks[name].get("taskInfo", {}).get("name") or name
        title = name if title.startswith(f"{name}: ") else title  # "name: details" is for the UI
        inner = tasks[name].get("componentRef", {}).get("name", "")
        below = "OMITTED" if step.state in ENDED else missing
        if not flat and ("parameterIterator" in tasks[name] or "artifactIterator" in tasks[name]):
            inside = tuple(
                replace(one, steps=tuple(_with_spec(one.steps, spec, inner, below, flat)))
                for one in step.steps
            )
        else:
            inside = tuple(_with_spec(steps if flat else step.steps, spec, inner, below, flat))
        yield replace(step, title=title, steps=inside)
    if not flat:
        yield from known.values()


def _sort_by_dependency(tasks: Mapping[str, Any]) -> list[str]:
    after = {name: set(tasks[name].get("dependentTasks", ())) & set(tasks) for name in tasks}
    order = TopologicalSorter(after)
    order.prepare()
    ordered: list[str] = []
    while ready := sorted(order.get_ready()):
        ordered += ready
        order.done(*ready)
    return ordered
