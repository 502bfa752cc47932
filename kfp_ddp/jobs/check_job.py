"""Checks of a job: rights, PVCs, queue and GPUs before it is created, its gang after that."""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from kfp_ddp.core.errors import InputError
from kfp_ddp.jobs import kueue
from kfp_ddp.jobs.kinds import Kind
from kfp_ddp.jobs.kinds.pod import resources
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.jobs.task import claims_by_volume
from kfp_ddp.k8s.api import Api, ApiError, Object, allowed, core, custom, schedulable_nodes
from kfp_ddp.k8s.objects import amount, conditions, gpus

GANG_SECONDS = 30.0


class Gang(NamedTuple):
    """A gang scheduler; `mark` is the label or annotation of a pod with its PodGroup's name."""

    group_version: str
    title: str
    mark: str

    @property
    def group(self) -> str:
        """The API group."""
        return self.group_version.partition("/")[0]


GANGS = {
    "volcano": Gang("scheduling.volcano.sh/v1beta1", "Volcano", "scheduling.k8s.io/group-name"),
    "coscheduling": Gang(
        "scheduling.x-k8s.io/v1alpha1", "scheduler-plugins", "scheduling.x-k8s.io/pod-group"
    ),
}


def check(api: Api, spec: LaunchSpec) -> list[str]:
    """Return warnings about a job that may not run; InputError for one that cannot."""
    kind = spec.job_kind
    if not allowed(api, "create", kind.group, kind.plural):
        raise InputError(
            f"no right to create {kind.plural} in namespace {api.namespace}; "
            "apply deploy/rbac there"
        )
    claims = [name.removesuffix(":ro") for name in spec.claims.values()]
    for claim in sorted({*claims, *claims_by_volume(spec.volumes).values()}):
        if _missing(api, core(api.namespace, "persistentvolumeclaims", claim)):
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
    gang = GANGS.get(spec.scheduler)
    if gang is None or not _missing(api, f"/apis/{gang.group_version}"):
        return ""
    return (
        f"scheduler={spec.scheduler}: this cluster has no PodGroups of {gang.title} "
        f"({gang.group_version}), so pods would start one by one; install it, or leave "
        "scheduler empty"
    )


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
    path, pods = kind.path(api.namespace, name), kind.pod_selector(name)
    deadline = time.monotonic() + GANG_SECONDS
    while (grouped := _grouped(api, gang, name, pods)) is None and time.monotonic() < deadline:
        if stopped():
            return
        time.sleep(0.5)
    if grouped or (grouped is None and _inconclusive(api, gang, kind, path)):
        return
    api.delete(path)
    raise InputError(
        f"scheduler={spec.scheduler}: the Training Operator created no PodGroup for {kind.title} "
        f"{name}, which was deleted; start the operator with --gang-scheduler-name of "
        f"{gang.title}, or leave scheduler empty"
    )


def _grouped(api: Api, gang: Gang, name: str, selector: str) -> bool | None:
    """Return whether a job has a PodGroup; None while it is unknown, without pods."""
    with suppress(ApiError):  # missing so far, or no right to read it: then the pods show it
        api.call("GET", custom(gang.group_version, api.namespace, "podgroups", name))
        return True
    try:
        query = {"labelSelector": selector, "limit": "16"}
        pods = api.call("GET", core(api.namespace, "pods"), query=query)["items"]
    except ApiError:
        return None
    parts = ("labels", "annotations")
    marks = [pod["metadata"].get(part) or {} for pod in pods for part in parts]
    return any(gang.mark in item for item in marks) if marks else None


def _inconclusive(api: Api, gang: Gang, kind: Kind, path: str) -> bool:
    """Return whether a missing PodGroup means nothing: the job is over, or not handled yet."""
    try:
        job = api.call("GET", path, retry=True)
    except ApiError:
        return True
    handled = conditions(job) and not kind.state(job).over
    return not handled or not allowed(api, "get", gang.group, "podgroups")


def _missing(api: Api, path: str) -> bool:
    """Return whether an object is missing; without the right to read it, it counts as existing."""
    try:
        api.call("GET", path, retry=True)
    except ApiError as error:
        return error.status == 404
    return False


def _gpu_warnings(api: Api, spec: LaunchSpec) -> list[str]:
    limits = resources(spec).get("limits", {})
    requested = {name: int(amount(n)) for name, n in limits.items() if spec.is_gpu(name)}
    if not any(requested.values()):
        return []
    try:
        available = gpus(schedulable_nodes(api))
    except ApiError:
        return []
    return [
        f"{count} {name} a node are requested and no node has more than {most}; "
        "the job waits unless the cluster adds nodes"
        for name, count in requested.items()
        if (most := available.get(name, [0])[0]) < count
    ]
