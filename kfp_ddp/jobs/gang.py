"""Whether Volcano or scheduler-plugins' coscheduling starts the pods of a job together.

The Training Operator creates a PodGroup for a job only if a flag of its own names the scheduler.
Without the flag it silently ignores the job's scheduling policy.
"""

import re
import time
from collections.abc import Callable
from typing import NamedTuple

from kfp_ddp.core.errors import InputError
from kfp_ddp.jobs.kinds import Kind
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.k8s.api import Api, ApiError, Object, allowed, core, custom
from kfp_ddp.k8s.objects import conditions

OPERATOR = "control-plane=kubeflow-training-operator"
FLAG = "--gang-scheduler-name"
MARKED = ("labels", "annotations")
SECONDS = 30.0


class Gang(NamedTuple):
    """A gang scheduler."""

    group_version: str
    title: str
    mark: str
    """Label or annotation of a pod with the name of its PodGroup."""


GANGS = {
    "volcano": Gang("scheduling.volcano.sh/v1beta1", "Volcano", "scheduling.k8s.io/group-name"),
    "coscheduling": Gang(
        "scheduling.x-k8s.io/v1alpha1", "scheduler-plugins", "scheduling.x-k8s.io/pod-group"
    ),
}


def gang_scheduling(api: Api, spec: LaunchSpec) -> str:
    """Return in one line why the pods of a job will not be started together.

    Returns:
        '' if they will, if it is not requested, or without the right to read the operator:
        `check_gang` checks the result.
    """
    gang = GANGS.get(spec.scheduler)
    if gang is None:
        return ""
    if not _served(api, gang):
        return (
            f"scheduler={spec.scheduler}: this cluster has no PodGroups of {gang.title} "
            f"({gang.group_version}), so pods would start one by one; install it, or leave "
            "scheduler empty"
        )
    name = _operators_gang(api)
    if name is None or (name and (name.lower() == "volcano") == (spec.scheduler == "volcano")):
        return ""
    flag = f"with {FLAG}={name}" if name else f"without {FLAG}"
    return (
        f"scheduler={spec.scheduler}: the Training Operator runs {flag}, so pods would start one "
        f"by one; start it with {_needed_flag(spec)}, or leave scheduler empty"
    )


def unsure(api: Api, spec: LaunchSpec) -> str:
    """Return a warning if the operator's flags cannot be read; '' if they can."""
    if spec.scheduler not in GANGS or _operators_gang(api) is not None:
        return ""
    return (
        f"scheduler={spec.scheduler}: whether the Training Operator was started with "
        f"{_needed_flag(spec)} is unknown here; a job for which it creates no PodGroup is deleted"
    )


def check_gang(
    api: Api, spec: LaunchSpec, job: Object, stopped: Callable[[], bool] = lambda: False
) -> None:
    """Wait until the operator has created a PodGroup for a job, or its pods without one.

    Args:
        api: The cluster.
        spec: The job's settings.
        job: The job.
        stopped: Returns whether to stop waiting.

    Raises:
        InputError: there is no PodGroup; the job is deleted.
    """
    gang = GANGS.get(spec.scheduler)
    kind = spec.job_kind
    if gang is None or kind.state(job).over:
        return
    name = str(job["metadata"]["name"])
    path = kind.path(api.namespace, name)
    deadline = time.monotonic() + SECONDS
    grouped = _grouped(api, gang, name, kind.pod_selector(name))
    while grouped is None and time.monotonic() < deadline and not stopped():
        time.sleep(0.5)
        grouped = _grouped(api, gang, name, kind.pod_selector(name))
    if grouped or (grouped is None and (stopped() or _inconclusive(api, gang, kind, path))):
        return
    api.delete(path)
    raise InputError(
        f"scheduler={spec.scheduler}: the Training Operator created no PodGroup for {kind.title} "
        f"{name}, which was deleted; start the operator with {_needed_flag(spec)}, or leave "
        "scheduler empty"
    )


def _served(api: Api, gang: Gang) -> bool:
    """Return whether the server has PodGroups of the scheduler; true if it does not answer."""
    try:
        api.call("GET", f"/apis/{gang.group_version}", retry=True)
    except ApiError as error:
        return error.status != 404
    return True


def _operators_gang(api: Api) -> str | None:
    """Return the scheduler in the operator's flags, '' for none; None if they cannot be read."""
    try:
        pods = api.call("GET", "/api/v1/pods", query={"labelSelector": OPERATOR})["items"]
    except ApiError:
        return None
    if not pods:
        return None
    containers = pods[0]["spec"]["containers"]
    words = [
        word for part in containers for key in ("command", "args") for word in part.get(key) or ()
    ]
    match = re.search(rf"{FLAG[1:]}[= ](\S+)", " ".join(words))
    return match[1] if match else ""


def _grouped(api: Api, gang: Gang, name: str, selector: str) -> bool | None:
    """Return whether a job has a PodGroup; None while it is unknown, without pods."""
    try:
        api.call("GET", custom(gang.group_version, api.namespace, "podgroups", name))
        return True
    except ApiError:
        pass  # missing so far, or no right to read it: then the pods show it
    try:
        query = {"labelSelector": selector, "limit": "16"}
        pods = api.call("GET", core(api.namespace, "pods"), query=query)
    except ApiError:
        return None
    marks = [pod["metadata"].get(part) or {} for pod in pods["items"] for part in MARKED]
    return any(gang.mark in item for item in marks) if marks else None


def _inconclusive(api: Api, gang: Gang, kind: Kind, path: str) -> bool:
    """Return whether a missing PodGroup means nothing: the job is over, or not handled yet."""
    try:
        job = api.call("GET", path, retry=True)
    except ApiError:
        return True
    if kind.state(job).over or not conditions(job):
        return True
    return not allowed(api, "get", gang.group_version.partition("/")[0], "podgroups")


def _needed_flag(spec: LaunchSpec) -> str:
    names = {"volcano": "volcano", "coscheduling": "<the scheduler's name>"}
    return f"{FLAG}={names[spec.scheduler]}"
