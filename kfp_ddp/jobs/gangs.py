"""Gangs: pods that a scheduler starts together, as PodGroups of Volcano or scheduler-plugins."""

from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from kfp_ddp.core.errors import InputError, Problem
from kfp_ddp.core.text import one_line
from kfp_ddp.jobs.kinds import Kind
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.k8s.api import Api, ApiError, Object, allowed, poll, serves
from kfp_ddp.k8s.objects import conditions, part, phase
from kfp_ddp.k8s.resource import PODS, Resource

GANG_SECONDS = 30.0


class Gang(NamedTuple):
    """A gang scheduler; `pod_key` is the label or annotation of a pod with its PodGroup's name."""

    resource: Resource
    title: str
    pod_key: str


VOLCANO = "scheduling.volcano.sh/v1beta1"
QUEUES = Resource(VOLCANO, "queues", namespaced=False)
GANGS = {
    "volcano": Gang(Resource(VOLCANO, "podgroups"), "Volcano", "scheduling.k8s.io/group-name"),
    "coscheduling": Gang(
        Resource("scheduling.x-k8s.io/v1alpha1", "podgroups"),
        "scheduler-plugins",
        "scheduling.x-k8s.io/pod-group",
    ),
}


def gang_problem(api: Api, spec: LaunchSpec) -> Problem | None:
    """Return why the pods of a job cannot be started together; None if they can."""
    gang = GANGS.get(spec.scheduler)
    if gang is None or serves(api, gang.resource):
        return None
    what = (
        f"scheduler={spec.scheduler}: this cluster has no PodGroups of {gang.title} "
        f"({gang.resource.group_version}), so pods would start one by one"
    )
    return Problem(what, "install it, or leave scheduler empty")


def check_gang(
    api: Api, spec: LaunchSpec, job: Object, stopped: Callable[[], bool] = lambda: False
) -> None:
    """Wait until the operator has created a PodGroup for a job, or its pods without one.

    Without its own flag, the Training Operator ignores a job's scheduling policy: then the job is
    deleted, with an InputError. `stopped` returns whether to stop waiting.
    """
    gang = GANGS.get(spec.scheduler)
    kind = spec.job_kind
    if gang is None or kind.state(job).over:
        return
    name = str(job["metadata"]["name"])
    pods = kind.pod_selector(name)
    for late in poll(GANG_SECONDS, 0.5):
        grouped = _grouped(api, gang, name, pods)
        if grouped is not None or late:
            break
        if stopped():
            return
    if grouped:
        return
    if grouped is None and _inconclusive(api, gang, kind, name):
        return
    api.delete(kind.resource, name)
    raise InputError(
        f"scheduler={spec.scheduler}: the Training Operator created no PodGroup for {kind.title} "
        f"{name}, which was deleted; start the operator with --gang-scheduler-name of "
        f"{gang.title}, or leave scheduler empty"
    )


def _grouped(api: Api, gang: Gang, name: str, selector: str) -> bool | None:
    """Return whether a job has a PodGroup; None while it is unknown, without pods."""
    with suppress(ApiError):  # without the right to read it, the pods show it
        if api.get(gang.resource, name) is not None:
            return True
    try:
        pods = api.list_objects(PODS, {"labelSelector": selector, "limit": "16"})
    except ApiError:
        return None
    if not pods:
        return None
    labels = [part(pod, "metadata", "labels") for pod in pods]
    annotations = [part(pod, "metadata", "annotations") for pod in pods]
    return any(gang.pod_key in marks for marks in labels + annotations)


def _inconclusive(api: Api, gang: Gang, kind: Kind, name: str) -> bool:
    """Return whether a missing PodGroup means nothing: the job is over, or not handled yet."""
    try:
        job = api.get(kind.resource, name, retry=True)
    except ApiError:
        return True
    if job is None or not conditions(job) or kind.state(job).over:
        return True
    return not allowed(api, "get", gang.resource)


def gang_waiting(api: Api, job: Object) -> str:
    """Return the state of a job's PodGroup and queue; '' without a gang, or the right to read it.

    For Volcano the operator creates pods only when their PodGroup is Inqueue.
    """
    run_policy = part(job, "spec", "runPolicy")
    if not run_policy.get("schedulingPolicy"):
        return ""
    for gang in GANGS.values():
        with suppress(ApiError):
            group = api.get(gang.resource, job["metadata"]["name"])
            if group:
                return _group_waiting(api, gang, group)
    return ""


def _group_waiting(api: Api, gang: Gang, group: Object) -> str:
    """Return the state of a PodGroup and of its queue, with the reason."""
    line = f"its PodGroup of {gang.title} is {phase(group) or 'not handled yet'}"
    queue = part(group, "spec").get("queue")
    if queue:
        line += f" in queue {queue}{_queue_state(api, queue)}"
    # Of two of the same second, the later one in the list.
    newest: Object = max(reversed(conditions(group)), key=_changed_at, default={})
    reason = one_line(newest.get("message") or newest.get("reason") or "")
    return f"{line} ({reason})" if reason else line


def _changed_at(condition: Object) -> str:
    return str(condition.get("lastTransitionTime"))


def _queue_state(api: Api, name: str) -> str:
    """Return what is wrong with a queue of Volcano; '' for nothing, or without the right."""
    with suppress(ApiError):
        queue = api.get(QUEUES, name)
        if queue is None:
            return ", which does not exist"
        state = part(queue, "status").get("state") or "Open"
        if state != "Open":
            return f", which is {state}"
    return ""
