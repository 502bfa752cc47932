"""Checks of a job before it is created: rights, PVCs, its gang, its queue and GPUs."""

from contextlib import suppress

from kfp_ddp.core.errors import InputError
from kfp_ddp.jobs import kueue
from kfp_ddp.jobs.gangs import gang_problem
from kfp_ddp.jobs.kinds.pod import resources
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.jobs.task import claims_by_volume
from kfp_ddp.k8s.api import Api, ApiError, require, schedulable_nodes
from kfp_ddp.k8s.objects import allocatable, parse_quantity
from kfp_ddp.k8s.resource import CLAIMS


def check(api: Api, spec: LaunchSpec) -> list[str]:
    """Return warnings about a job that may not run; InputError for one that cannot."""
    kind = spec.job_kind
    require(api, kind.resource, "create")
    _check_claims(api, spec)
    problem = gang_problem(api, spec)
    if problem:
        raise InputError(problem)
    warnings: list[str] = []
    if spec.scheduler == "kueue" and spec.queue:
        warnings += kueue.check_queue(api, spec.queue)
    kind.find_runtime(api, spec)
    return warnings + _gpu_warnings(api, spec)


def _check_claims(api: Api, spec: LaunchSpec) -> None:
    """Raise InputError for a PVC that does not exist."""
    claims = {name.removesuffix(":ro") for name in spec.claims.values()}
    claims |= set(claims_by_volume(spec.volumes).values())
    for claim in sorted(claims):
        with suppress(ApiError):  # without the right to read it, it counts as existing
            if api.get(CLAIMS, claim, retry=True) is None:
                raise InputError(
                    f"claim {claim} does not exist in namespace {api.namespace}; create it as "
                    "deploy/storage/claims.yaml does"
                )


def _gpu_warnings(api: Api, spec: LaunchSpec) -> list[str]:
    limits = resources(spec).get("limits", {})
    requested: dict[str, int] = {}
    for name, limit in limits.items():
        if spec.is_gpu(name):
            requested[name] = int(parse_quantity(limit))
    if not any(requested.values()):
        return []
    try:
        available = allocatable(schedulable_nodes(api))
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
