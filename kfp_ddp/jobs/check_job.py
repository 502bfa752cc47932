"""What can be known before a job is created: rights, claims, queues, GPUs."""

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
    """Warnings about a job that may not run.

    Raises:
        InputError: for a job that cannot run: no right to create it, a claim, runtime or queue
            that does not exist, a gang that nobody would start together.
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
    warnings = [said] if (said := unsure(api, spec)) else []
    if spec.scheduler == "kueue" and spec.queue:
        warnings += kueue.check_queue(api, spec.queue)
    kind.find_runtime(api, spec)
    return warnings + _warnings(api, spec)


def _missing(api: Api, path: str) -> bool:
    """Whether the server says that it is not there; what we may not see counts as there."""
    try:
        api.call("GET", path, retry=True)
    except ApiError as error:
        return error.status == 404
    return False


def _warnings(api: Api, spec: LaunchSpec) -> list[str]:
    limits = resources(spec).get("limits", {})
    wanted = {name: int(float(n)) for name, n in limits.items() if spec.is_gpu(name)}
    if not any(wanted.values()):
        return []
    try:
        there = gpus(schedulable(api))
    except ApiError:
        return []
    found = []
    for name, count in wanted.items():
        most = there.get(name, [0])[0]
        if most < count:
            found.append(
                f"{count} {name} a node are asked for and no node has more than {most}; "
                "the job waits unless nodes are added by themselves"
            )
    return found
