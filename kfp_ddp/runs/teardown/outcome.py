"""Determine how a run ended, from the files in its folder and from its pods."""

import contextlib
import re
from typing import Any

from kfp_ddp.core.errors import InputError, KfpDdpError
from kfp_ddp.core.failure import Failure
from kfp_ddp.core.run_folder import EXPORTED, VERDICT, RunFolder
from kfp_ddp.core.settings import mapping_in
from kfp_ddp.core.step import last_error
from kfp_ddp.jobs.ending import terminated
from kfp_ddp.jobs.identity import KFP_RUN, WORKFLOWS
from kfp_ddp.k8s.api import Api, ApiError, Object, core, custom
from kfp_ddp.k8s.objects import annotation, phase
from kfp_ddp.k8s.pods import failure_reason, terminations
from kfp_ddp.runs.notify import Outcome
from kfp_ddp.storage.kinds import open_store
from kfp_ddp.storage.store import Store

NODE = "workflows.argoproj.io/node-name"
_LARGEST = 1 << 20
ADVANCE = ("trained", "failed", "not blessed", "blessed", "exported", "promoted")
"""States of a training; of several in a run, the most advanced counts."""


def outcome(run_id: str, work: str, address: str) -> Outcome:
    """Return how a run ended; `address` is its page in the UI, '' if not known."""
    fields: dict[str, Any] = {"run_id": run_id, "address": address}
    where = open_store(f"{work.rstrip('/')}/{run_id}")
    names = [name for name, _ in where.list("")]
    states = [_of_task(where, names, task) for task in sorted({n.split("/")[0] for n in names})]
    states = [state for state in states if state["state"] in ADVANCE]
    last: dict[str, Any] = {"state": "unchanged"}
    fields |= max(states, key=lambda state: ADVANCE.index(state["state"]), default=last)
    try:
        api = Api.connect()
    except InputError:
        pass  # no cluster, so no pods
    else:
        if _cancelled(api, run_id):
            return Outcome(**fields | {"state": "cancelled", "reason": ""})
        if failed := _failed(api, run_id):
            fields |= {"state": "failed", "step": failed[0], "reason": failed[1]}
    return Outcome(**fields)


def _of_task(where: Store, names: list[str], task: str) -> dict[str, Any]:
    """Return the fields that the folder of one training gives."""
    inside = {name for name in names if name.startswith(f"{task}/")}
    verdict: dict[str, Any] = {}
    for name in sorted(inside):
        if name.endswith(f"/{VERDICT}"):
            verdict |= _read(where, name)
    exported = _read(where, f"{task}/{EXPORTED}") if f"{task}/{EXPORTED}" in inside else {}
    if exported:
        state = "promoted" if exported.get("champion") else "exported"
        reason = str(exported.get("champion_stays", ""))
    elif "blessed" in verdict:
        state = "blessed" if verdict["blessed"] else "not blessed"
        reason = str(verdict.get("reason", "")).removeprefix(f"{state}: ")
    else:
        # The root cause that the ranks recorded.
        content = where.read(f"{task}/logs/failure.json", _LARGEST) or b""
        if failure := Failure.parse(content.decode(errors="replace")):
            return {"state": "failed", "step": task, "reason": failure.words}
        return {"state": "trained" if f"{task}/{RunFolder.METRICS}" in inside else ""}
    return {
        "state": state,
        "reason": reason,
        "model": str(exported.get("name") or verdict.get("model", "")),
        "accuracy": verdict.get("accuracy"),
        "champion": str(verdict.get("champion", "")),
        "champion_accuracy": verdict.get("champion_accuracy"),
        "bundle": str(exported.get("uri", "")),
        "dataset": str(verdict.get("dataset_digest", "")),
    }


def _read(where: Store, name: str) -> dict[str, Any]:
    try:
        return mapping_in(where.read(name, _LARGEST))
    except KfpDdpError:
        return {}


def _cancelled(api: Api, run_id: str) -> bool:
    path, of_run = custom(WORKFLOWS, api.namespace, "workflows"), f"{KFP_RUN}={run_id}"
    try:
        workflows = api.call("GET", path, query={"labelSelector": of_run})["items"]
        return any(map(terminated, workflows))
    except ApiError:
        return False


def _failed(api: Api, run_id: str) -> tuple[str, str] | None:
    """Return the first step that failed and why; None for none, or if pods cannot be listed."""
    query = {"labelSelector": f"{KFP_RUN}={run_id}"}
    try:
        pods = api.call("GET", core(api.namespace, "pods"), query=query)["items"]
    except ApiError:
        return None
    last: dict[str, Object] = {}
    for pod in sorted(pods, key=lambda pod: pod["metadata"].get("creationTimestamp", "")):
        last[_node(pod)] = pod
    failed = [pod for pod in last.values() if phase(pod) == "Failed"]
    if not failed:
        return None
    first = min(failed, key=_ended_at)
    parts = [re.sub(r"\(\d+\)$", "", part) for part in _node(first).split(".")]
    named = [part for part in parts if part != "executor"]
    return named[-1].removesuffix("-driver"), _why(api, first)


def _node(pod: Object) -> str:
    """Return the node of the Workflow that a pod is an attempt of."""
    return re.sub(r"\(\d+\)$", "", annotation(pod, NODE) or pod["metadata"]["name"])


def _ended_at(pod: Object) -> str:
    return max((str(state.get("finishedAt", "")) for state in terminations(pod)), default="")


def _why(api: Api, pod: Object) -> str:
    """Return the error in the step's log, else the reason that Kubernetes gives."""
    path = f"{core(api.namespace, 'pods', pod['metadata']['name'])}/log"
    names = [container["name"] for container in pod["spec"]["containers"]]
    query = {"container": "main" if "main" in names else names[0], "tailLines": "400"}
    error = ""
    with contextlib.suppress(ApiError):  # the pod is deleted, or its log is forbidden
        error = last_error(api.call("GET", path, query=query, raw=True)["value"])
    reason = failure_reason(pod)
    return error or (reason.text if reason else pod["status"].get("message")) or "see its log"
