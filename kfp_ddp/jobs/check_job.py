"""Checks of a job: rights, PVCs, queue and GPUs before it is created, its gang after that."""

from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from kfp_ddp.core.errors import InputError, Problem
from kfp_ddp.core.polling import poll
from kfp_ddp.core.text import one_line
from kfp_ddp.jobs import kueue
from kfp_ddp.jobs.kinds import Kind
from kfp_ddp.jobs.kinds.pod import resources
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.jobs.task import claims_by_volume
from kfp_ddp.k8s.api import Api, ApiError, Object, allowed, require, schedulable_nodes, serves
from kfp_ddp.k8s.objects import allocatable, conditions, parse_quantity, phase
from kfp_ddp.k8s.resource import CLAIMS, PODS, Resource

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


def check(api: Api, spec: LaunchSpec) -> list[str]:
    """Return warnings about a job that may not run; InputError for one that cannot."""
    kind = spec.job_kind
    require(api, kind.resource, "create")
    claims = [name.removesuffix(":ro") for name in spec.claims.values()]
    for claim in sorted({*claims, *claims_by_volume(spec.volumes).values()}):
        with suppress(ApiError):  # without the right to read it, it counts as existing
            if api.get(CLAIMS, claim, retry=True) is None:
                raise InputError(
                    f"claim {claim} does not exist in namespace {api.namespace}; create it as "
                    "deploy/storage/claims.yaml does"
                )
    if problem := gang_scheduling(api, spec):
        raise InputError(problem)
    queued = spec.scheduler == "kueue" and spec.queue
    warnings = kueue.check_queue(api, spec.queue) if queued else []
    kind.find_runtime(api, spec)
    return warnings + _gpu_warnings(api, spec)


def gang_scheduling(api: Api, spec: LaunchSpec) -> str:
    """Return in one line why the pods of a job cannot be started together; '' if they can."""
    return str(gang_problem(api, spec) or "")


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
    gang, kind = GANGS.get(spec.scheduler), spec.job_kind
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
    if grouped or (grouped is None and _inconclusive(api, gang, kind, name)):
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
    parts = ("labels", "annotations")
    marks = [pod["metadata"].get(part) or {} for pod in pods for part in parts]
    return any(gang.pod_key in item for item in marks) if marks else None


def _inconclusive(api: Api, gang: Gang, kind: Kind, name: str) -> bool:
    """Return whether a missing PodGroup means nothing: the job is over, or not handled yet."""
    try:
        job = api.get(kind.resource, name, retry=True)
    except ApiError:
        return True
    handled = job and conditions(job) and not kind.state(job).over
    return not handled or not allowed(api, "get", gang.resource)


def gang_waiting(api: Api, job: Object) -> str:
    """Return the state of a job's PodGroup and queue; '' without a gang, or the right to read it.

    For Volcano the operator creates pods only when their PodGroup is Inqueue.
    """
    if not ((job.get("spec") or {}).get("runPolicy") or {}).get("schedulingPolicy"):
        return ""
    for gang in GANGS.values():
        with suppress(ApiError):
            if group := api.get(gang.resource, job["metadata"]["name"]):
                line = f"its PodGroup of {gang.title} is {phase(group) or 'not handled yet'}"
                if queue := (group.get("spec") or {}).get("queue"):
                    line += f" in queue {queue}{_queue_state(api, queue)}"
                times = {str(one.get("lastTransitionTime")): one for one in conditions(group)}
                newest = times[max(times)] if times else {}
                why = one_line(newest.get("message") or newest.get("reason") or "")
                return f"{line} ({why})" if why else line
    return ""


def _queue_state(api: Api, name: str) -> str:
    """Return what is wrong with a queue of Volcano; '' for nothing, or without the right."""
    with suppress(ApiError):
        if (queue := api.get(QUEUES, name)) is None:
            return ", which does not exist"
        state = (queue.get("status") or {}).get("state") or "Open"
        return "" if state == "Open" else f", which is {state}"
    return ""


def _gpu_warnings(api: Api, spec: LaunchSpec) -> list[str]:
    limits = resources(spec).get("limits", {})
    requested = {name: int(parse_quantity(n)) for name, n in limits.items() if spec.is_gpu(name)}
    if not any(requested.values()):
        return []
    try:
        available = allocatable(schedulable_nodes(api))
    except ApiError:
        return []
    return [
        f"{count} {name} a node are requested and no node has more than {most}; "
        "the job waits unless the cluster adds nodes"
        for name, count in requested.items()
        if (most := available.get(name, [0])[0]) < count
    ]
