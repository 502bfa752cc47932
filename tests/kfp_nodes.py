"""The nodes of a run's Argo Workflow, as KFP compiles it, and as the KFP API lists them."""

import re
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from kfp_ddp.client.kfp.steps import fnv

Node = dict[str, Any]
BEGIN = datetime(2026, 11, 21, 22, 51, 6, tzinfo=UTC)
OVER = ("SUCCEEDED", "FAILED")
SPACE = uuid.UUID(int=0)
States = Mapping[str, Any]
"""States of tasks: KFP's, DRIVING or UNDRIVEN for a driver's own, CACHED, or, for a loop, the
states of its iterations. A task that is not named has not started."""


def details(nodes: Iterable[Node], run_id: str) -> list[Node]:
    """Return nodes as the KFP API lists them, in no order."""
    listed, nodes = [], list(nodes)
    ids, children = {node["name"]: node["id"] for node in nodes}, dict[str, list[str]]()
    for node in nodes:
        name = re.sub(r"\(\d+\)$", "", node["name"])
        before = f"{name}-driver(0)" if name == node["name"] else name
        parent = str(ids.get(before, node.get("boundaryID", "")))
        children.setdefault(parent, []).append(node["id"])
    for node in nodes:
        state = {"Omitted": None, "": None}.get(node["phase"], node["phase"].upper())
        detail = {
            "run_id": run_id,
            "task_id": str(uuid.uuid5(SPACE, run_id + node["name"])),
            "display_name": node["displayName"],
            "create_time": _text(BEGIN),
            "start_time": node["startedAt"],
            "end_time": node["finishedAt"] or "0001-01-01T00:00:00Z",
        }
        below = [{"pod_name": one} for one in children.get(node["id"], [])]
        detail |= {"child_tasks": below} if below else {}
        listed.append(detail | ({"state": state} if state else {}))
    return sorted(listed, key=lambda one: str(one["task_id"]))


class Workflow:
    """Lays out the nodes of a Workflow."""

    def __init__(self, spec: Mapping[str, Any], name: str, over: bool) -> None:
        self.nodes: list[Node] = []
        self._spec, self._name, self._over = spec, name, over
        self._clock = BEGIN

    def lay(self, states: States) -> list[Node]:
        """Return the nodes of a whole run."""
        first = f"{self._name}(0)"
        self._driver(f"{first}.root", "SUCCEEDED")
        self._twice(self._name, self._group(f"{first}.root", "root", states), BEGIN)
        return self.nodes

    def _group(self, name: str, component: str, states: States) -> str:
        """Lay out a DAG and its content; return its state."""
        begin, inside, last = self._clock, [], ""
        inner = self._spec["root"] if component == "root" else self._spec["components"][component]
        tasks = inner["dag"]["tasks"]
        for task in _order(tasks):
            hook = tasks[task].get("triggerPolicy", {}).get("strategy", "").endswith("COMPLETED")
            parent = f"{name}(0).{last}.onExit" if hook else name
            start = self._clock
            state = self._task(f"{parent}(0).{task}", task, tasks[task], states)
            if hook and state:
                self._twice(parent, state, start)
            last = task
            inside.append(state)
        state = _summed(inside, self._over)
        self._twice(name, state, begin)
        return state

    def _task(self, name: str, task: str, spec: Mapping[str, Any], states: States) -> str:
        component = spec["componentRef"]["name"]
        state = states.get(task)
        if "dag" not in self._spec["components"][component]:
            return self._step(name, state)
        if "parameterIterator" in spec and state:
            return self._loop(name, component, state)
        if state == "SKIPPED" or not self._begun(component, states):
            if state == "SKIPPED" or self._over:
                self._driver(name, "SUCCEEDED" if state else "OMITTED")
                self._twice(name, state or "OMITTED", self._clock)
            return state or ""
        self._driver(name, "SUCCEEDED")
        return self._group(name, component, states)

    def _begun(self, component: str, states: States) -> bool:
        tasks = self._spec["components"][component].get("dag", {}).get("tasks", {})
        return any(
            task in states or self._begun(spec["componentRef"]["name"], states)
            for task, spec in tasks.items()
        )

    def _loop(self, name: str, component: str, iterations: Sequence[States]) -> str:
        begin, inner = self._clock, f"{name}(0)"
        self._driver(f"{inner}.iteration", "SUCCEEDED")
        inside = []
        for number, states in enumerate(iterations):
            item, start = f"{inner}.iteration-iterations({number}:{number})", self._clock
            self._driver(f"{item}(0).iteration-item", "SUCCEEDED")
            inside.append(self._group(f"{item}(0).iteration-item", component, states))
            self._twice(item, inside[-1], start)
        state = _summed(inside, self._over)
        self._add(f"{inner}.iteration-iterations", state, begin)
        self._twice(name, state, begin)
        return state

    def _step(self, name: str, state: str | None) -> str:
        """Lay out a driver and an executor."""
        if state is None:
            if self._over:
                self._add(f"{name}-driver", "OMITTED")
                self._add(name, "OMITTED")
            return ""
        if state in ("DRIVING", "UNDRIVEN"):
            own = "RUNNING" if state == "DRIVING" else "FAILED"
            self._driver(name, own)
            if own == "FAILED" and self._over:
                self._add(name, "OMITTED")
            return own
        self._driver(name, "SUCCEEDED")
        begin = self._clock
        pod = {"CACHED": "SKIPPED"}.get(state, state)
        whole = {"CACHED": "SUCCEEDED", "PENDING": "RUNNING"}.get(state, state)
        if state != "CACHED":
            self._add(f"{name}(0).executor(0)", pod, begin)
        self._add(f"{name}(0).executor", pod if state == "CACHED" else whole, begin)
        self._twice(name, whole, begin)
        return whole

    def _driver(self, name: str, state: str) -> None:
        self._twice(f"{name}-driver", state, self._clock)

    def _twice(self, name: str, state: str, begin: datetime) -> None:
        """Add a node that may be tried again, and its only attempt."""
        self._add(name, state, begin)
        self._add(f"{name}(0)", state, begin)

    def _add(self, name: str, state: str, begin: datetime | None = None) -> None:
        self._clock += timedelta(seconds=2)
        group, _, display = name.rpartition("(0).")
        node: Node = {
            "id": self.id(name),
            "name": name,
            "displayName": display,
            "phase": state.capitalize(),
            "startedAt": _text(begin or self._clock),
            "finishedAt": _text(self._clock) if state in (*OVER, "OMITTED") else None,
        }
        if group:
            node["boundaryID"] = self.id(f"{group}(0)")
        self.nodes.append(node)

    def id(self, name: str) -> str:
        """Return the id of a node as Argo does, with a hash of the name."""
        return f"{self._name}-{fnv(name)}"


def _summed(states: Sequence[str], over: bool) -> str:
    if "FAILED" in states:
        return "FAILED"
    return "SUCCEEDED" if over or all(state == "SUCCEEDED" for state in states) else "RUNNING"


def _order(tasks: Mapping[str, Any]) -> list[str]:
    """Return tasks after those that they wait for."""

    def after(name: str) -> Iterator[str]:
        for before in tasks[name].get("dependentTasks", []):
            yield from after(before)
        yield name

    return list(dict.fromkeys(one for name in sorted(tasks) for one in after(name)))


def _text(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
