"""The nodes of a run as a KFP server lists them: those of an Argo workflow, linked by their ids."""

import random
import uuid
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from kfp_ddp.client.steps import node_id

BEGIN = datetime(2026, 11, 21, 22, 51, 6, tzinfo=UTC)
OVER = ("SUCCEEDED", "FAILED")
States = Mapping[str, Any]
"""What tasks came to: a state, DRIVING or UNDRIVEN for a driver's own, CACHED, or, for a loop, the
states of its iterations. A task that is not named has not begun."""


class Nodes:
    """Lays out nodes; `details` are they, as JSON of the API has them."""

    def __init__(self, spec: Mapping[str, Any], run_id: str, workflow: str, over: bool) -> None:
        self.details: list[dict[str, Any]] = []
        self._spec, self._run_id, self._workflow, self._over = spec, run_id, workflow, over
        self._clock = BEGIN
        self._random = random.Random(run_id)

    def lay(self, states: States) -> list[dict[str, Any]]:
        """The nodes of a whole run, in no order, as the server lists them."""
        name, first = self._workflow, f"{self._workflow}(0)"
        self._driver(f"{first}.root", "SUCCEEDED", [f"{first}.root"])
        state = self._group(f"{first}.root", "root", states)
        self._twice(name, state, [f"{first}.root-driver"], BEGIN)
        return sorted(self.details, key=lambda each: each["task_id"])

    def _group(self, name: str, component: str, states: States) -> str:
        """A DAG and all in it; its state."""
        begin, came_to, last = self._clock, [], ""
        inner = self._spec["root"] if component == "root" else self._spec["components"][component]
        tasks = inner["dag"]["tasks"]
        first = [f"{name}(0).{task}{_driver(tasks[task])}" for task in _order(tasks)[:1]]
        for task in _order(tasks):
            hook = tasks[task].get("triggerPolicy", {}).get("strategy", "").endswith("COMPLETED")
            parent = f"{name}(0).{last}.onExit" if hook else f"{name}(0)"
            begun = self._clock
            state = self._task(f"{parent.removesuffix('(0)')}(0).{task}", task, tasks[task], states)
            if hook and state:
                step = f"{parent}(0).{task}{_driver(tasks[task])}"
                self._twice(parent, state, [step], begun)
            last = task
            came_to.append(state)
        state = _summed(came_to, self._over)
        self._twice(name, state, first, begin)
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
                kind = state or None
                self._driver(name, "SUCCEEDED" if kind else None, [name])
                self._twice(name, kind, [], self._clock)
            return state or ""
        self._driver(name, "SUCCEEDED", [name])
        return self._group(name, component, states)

    def _begun(self, component: str, states: States) -> bool:
        tasks = self._spec["components"][component].get("dag", {}).get("tasks", {})
        return any(
            task in states or self._begun(spec["componentRef"]["name"], states)
            for task, spec in tasks.items()
        )

    def _loop(self, name: str, component: str, each: Sequence[States]) -> str:
        begin, inner = self._clock, f"{name}(0)"
        items = [f"{inner}.iteration-iterations({i}:{i})" for i in range(len(each))]
        self._driver(f"{inner}.iteration", "SUCCEEDED", [f"{inner}.iteration-iterations"])
        came_to = []
        for item, states in zip(items, each, strict=True):
            begun = self._clock
            self._driver(f"{item}(0).iteration-item", "SUCCEEDED", [f"{item}(0).iteration-item"])
            came_to.append(self._group(f"{item}(0).iteration-item", component, states))
            self._twice(item, came_to[-1], [f"{item}(0).iteration-item-driver"], begun)
        state = _summed(came_to, self._over)
        self._add(f"{inner}.iteration-iterations", state, items, begin)
        self._twice(name, state, [f"{inner}.iteration-driver"], begin)
        return state

    def _step(self, name: str, state: str | None) -> str:
        """A driver and an executor."""
        if state is None:
            if self._over:
                self._add(f"{name}-driver", None, [name])
                self._add(name, None, [f"{name}-next"])
            return ""
        if state in ("DRIVING", "UNDRIVEN"):
            own = "RUNNING" if state == "DRIVING" else "FAILED"
            left_out = state == "UNDRIVEN" and self._over
            self._driver(name, own, [name] if left_out else [])
            if left_out:
                self._add(name, None, [])
            return own
        self._driver(name, "SUCCEEDED", [name])
        begin = self._clock
        pod = {"CACHED": "SKIPPED"}.get(state, state)
        whole = {"CACHED": "SUCCEEDED", "PENDING": "RUNNING"}.get(state, state)
        inner = f"{name}(0).executor"
        if state == "CACHED":
            self._add(inner, pod, [], begin)
        else:
            self._add(f"{inner}(0)", pod, [], begin)
            self._add(inner, whole, [f"{inner}(0)"], begin)
        self._twice(name, whole, [inner], begin)
        return whole

    def _driver(self, name: str, state: str | None, following: list[str]) -> None:
        begin = self._clock
        self._add(f"{name}-driver", state, [f"{name}-driver(0)"], begin)
        self._add(f"{name}-driver(0)", state, following, begin)

    def _twice(self, name: str, state: str | None, inner: list[str], begin: datetime) -> None:
        """A node that may be tried again, and its only attempt."""
        self._add(name, state, [f"{name}(0)"], begin)
        self._add(f"{name}(0)", state, inner, begin)

    def _add(
        self, name: str, state: str | None, children: list[str], begin: datetime | None = None
    ) -> None:
        self._clock += timedelta(seconds=2)
        display = name.split("(0).")[-1]
        node: dict[str, Any] = {
            "run_id": self._run_id,
            "task_id": str(uuid.UUID(int=self._random.getrandbits(128))),
            "display_name": display,
            "create_time": _text(BEGIN),
            "start_time": _text(begin or self._clock),
            "end_time": _text(self._clock if state in (*OVER, None) else datetime.min),
            "state_history": [{"update_time": _text(self._clock)}],
        }
        if state:
            node["state"] = node["state_history"][0]["state"] = state
        if children:
            ids = [{"pod_name": node_id(self._workflow, child)} for child in children]
            node["child_tasks"] = ids
        self.details.append(node)


def _driver(spec: Mapping[str, Any]) -> str:
    return "" if "parameterIterator" in spec else "-driver"


def _summed(states: Sequence[str], over: bool) -> str:
    if "FAILED" in states:
        return "FAILED"
    return "SUCCEEDED" if over or all(state == "SUCCEEDED" for state in states) else "RUNNING"


def _order(tasks: Mapping[str, Any]) -> list[str]:
    """Tasks after those that they wait for."""

    def after(name: str) -> Iterator[str]:
        for before in tasks[name].get("dependentTasks", []):
            yield from after(before)
        yield name

    return list(dict.fromkeys(one for name in sorted(tasks) for one in after(name)))


def _text(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ") if moment.year > 1 else "1970-01-01T00:00:00Z"
