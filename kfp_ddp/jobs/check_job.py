"""Checks before a job is created: rights, PVCs, queues, GPUs."""

from kfp_ddp.core.errors import InputError
from kfp_ddp.jobs import kueue
from kfp_ddp.jobs.gang import gang_scheduling, unsure
from kfp_ddp.jobs.kinds.pod import resources
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.jobs.task import by_volume
from kfp_ddp.k8s.api import Api, ApiError, allowed, core
from kfp_ddp.k8s.nodes import gpus, schedulable

__all__ = ["check", "gang_scheduling"]


def check(api: Api, spec: LaunchSpec) -> list[str]:
    """Return warnings about a job that may not run.

    Raises:
        InputError: the job cannot run: no right to create it, a missing PVC, runtime or queue, or
            no gang scheduling.
    """
    kind = spec.job_kind
    if not allowed(api, "create", kind.group, kind.plural):
        raise InputError(
            f"no right to create {kind.plural} in namespace {api.namespace}; "
            "apply deploy/rbac there"
        )
    claims = {name.removesuffix(":ro") for name in spec.claims.values()}
    for claim in sorted(claims.union(by_volume(spec.volumes).values())):
        if _missing(api, core(api.namespace, "persistentvolumeclaims", claim)):
            raise InputError(
                f"claim {claim} does not exist in namespace {api.namespace}; create it as "
                "deploy/storage/claims.yaml does"
            )
    if problem := gang_scheduling(api, spec):
        raise InputError(problem)
    warnings = [warning] if (warning := unsure(api, spec)) else []
    if spec.scheduler == "kueue" and spec.queue:
        warnings += kueue.check_queue(api, spec.queue)
    kind.find_runtime(api, spec)
    return warnings + _warnings(api, spec)


def _missing(api: Api, path: str) -> bool:
    """Return whether an object is missing; without the right to read it, it counts as existing."""
    try:
        api.call("GET", path, retry=True)
    except ApiError as error:
        return error.status == 404
    return False


def _warnings(api: Api, spec: LaunchSpec) -> list[str]:
    limits = resources(spec).get("limits", {})
    requested = {name: int(float(n)) for name, n in limits.items() if spec.is_gpu(name)}
    if not any(requested.values()):
        return []
    try:
        available = gpus(schedulable(api))
    except ApiError:
        return []
    warnings = []
    for name, count in requested.items():
        most = available.get(name, [0])[0]
        if most < count:
            warnings.append(
                f"{count} {name} a node are requested and no node has more than {most}; "
                "the job waits unless the cluster adds nodes"
            )
    return warnings
