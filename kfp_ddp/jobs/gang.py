"""Whether the pods of a job are started together by Volcano or by scheduler-plugins' coscheduling.

The Training Operator makes a PodGroup of a job only where it was started with a flag that names the
scheduler; without it, it takes a job's scheduling policy and says nothing.
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
    """What a scheduler of gangs is called where, and how a pod of a gang is known."""

    group_version: str
    title: str
    mark: str
    """Label or annotation by which the operator tells a pod its PodGroup."""


GANGS = {
    "volcano": Gang("scheduling.volcano.sh/v1beta1", "Volcano", "scheduling.k8s.io/group-name"),
    "coscheduling": Gang(
        "scheduling.x-k8s.io/v1alpha1", "scheduler-plugins", "scheduling.x-k8s.io/pod-group"
    ),
}


def gang_scheduling(api: Api, spec: LaunchSpec) -> str:
    """Why the pods of a job will not be started together, in one line.

    Returns:
        '' where they will, where nobody asked for it, or where the operator may not be looked at:
        `check_gang` sees what became of it.
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
    found = f"with {FLAG}={name}" if name else f"without {FLAG}"
    return (
        f"scheduler={spec.scheduler}: the Training Operator runs {found}, so pods would start one "
        f"by one; start it with {_wanted(spec)}, or leave scheduler empty"
    )


def unsure(api: Api, spec: LaunchSpec) -> str:
    """That nobody can tell before whether a gang will be one; '' where it can be told."""
    if spec.scheduler not in GANGS or _operators_gang(api) is not None:
        return ""
    return (
        f"scheduler={spec.scheduler}: whether the Training Operator was started with "
        f"{_wanted(spec)} cannot be seen from here; a job of which it makes no PodGroup is deleted"
    )


def check_gang(
    api: Api, spec: LaunchSpec, job: Object, stopped: Callable[[], bool] = lambda: False
) -> None:
    """Wait until the operator has made a PodGroup of a job, or made its pods without one.

    Args:
        api: The cluster.
        spec: What the job was made from.
        job: The job.
        stopped: Whether to wait no longer.

    Raises:
        InputError: there is none; the job is deleted.
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
    if grouped or (grouped is None and (stopped() or _says_nothing(api, gang, kind, path))):
        return
    api.delete(path)
    raise InputError(
        f"scheduler={spec.scheduler}: the Training Operator made no PodGroup of {kind.title} "
        f"{name}, which is deleted again; start the operator with {_wanted(spec)}, or leave "
        "scheduler empty"
    )


def _served(api: Api, gang: Gang) -> bool:
    """Whether the server has PodGroups of the scheduler; true where it does not say."""
    try:
        api.call("GET", f"/apis/{gang.group_version}", retry=True)
    except ApiError as error:
        return error.status != 404
    return True


def _operators_gang(api: Api) -> str | None:
    """The scheduler that the operator was told to use, '' for none; None where it is not seen."""
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
    told = re.search(rf"{FLAG[1:]}[= ](\S+)", " ".join(words))
    return told[1] if told else ""


def _grouped(api: Api, gang: Gang, name: str, selector: str) -> bool | None:
    """Whether a job has a PodGroup; None while neither it nor a pod is there to tell."""
    try:
        api.call("GET", custom(gang.group_version, api.namespace, "podgroups", name))
        return True
    except ApiError:
        pass  # it is not there yet, or not ours to see: then its pods tell
    try:
        some = {"labelSelector": selector, "limit": "16"}
        pods = api.call("GET", core(api.namespace, "pods"), query=some)
    except ApiError:
        return None
    marks = [pod["metadata"].get(part) or {} for pod in pods["items"] for part in MARKED]
    return any(gang.mark in each for each in marks) if marks else None


def _says_nothing(api: Api, gang: Gang, kind: Kind, path: str) -> bool:
    """Whether nothing follows from what is not there: the job is over, or nobody looked at it."""
    try:
        job = api.call("GET", path, retry=True)
    except ApiError:
        return True
    if kind.state(job).over or not conditions(job):
        return True
    return not allowed(api, "get", gang.group_version.partition("/")[0], "podgroups")


def _wanted(spec: LaunchSpec) -> str:
    names = {"volcano": "volcano", "coscheduling": "<the scheduler's name>"}
    return f"{FLAG}={names[spec.scheduler]}"
