"""Whether the claims of a run can be mounted by all of its pods at once."""

from collections.abc import Iterable, Mapping

from kfp_ddp.core.errors import InputError
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.jobs.task import by_volume
from kfp_ddp.k8s.api import Api, ApiError, Object, core

ON_MANY_NODES = {"ReadWriteMany", "ReadOnlyMany"}


def mounted_at_once(spec: LaunchSpec, work: str, data: str, publish: str) -> list[str]:
    """The claims that the launching step and the workers mount at one time.

    Args:
        spec: The job, with claims of its own.
        work: Claim of checkpoints; '' for none.
        data: Claim of the dataset's versions; '' for none.
        publish: How workers get the data; a copy is mounted in place of `data`.
    """
    own = {*spec.claims.values(), *by_volume(spec.volumes).values()}
    found = {work, *(name.removesuffix(":ro") for name in own)}
    return sorted((found | {data} if publish in ("in-place", "none") else found) - {""})


def check_modes(
    api: Api, claims: Iterable[str], instead: Mapping[str, str], nodes: int | None, pods: int
) -> list[str]:
    """Refuse claims that would keep the pods of a run waiting for each other for ever.

    Args:
        api: Asks the cluster; a claim that may not be read is passed over.
        claims: What `mounted_at_once` has found.
        instead: What else can be done than to make a claim for many nodes, by its name.
        nodes: Nodes of the cluster; None where they cannot be seen.
        pods: Pods of the job.

    Returns:
        A warning for each claim that several nodes could not mount, where nobody can see how many
        there are: that of a cluster with one node works.

    Raises:
        InputError: naming the first claim that cannot be mounted by all of them.
    """
    warnings = []
    for name in claims:
        path = core(api.namespace, "persistentvolumeclaims", name)
        try:
            found = api.call("GET", path, retry=True)
        except ApiError:
            continue
        if trouble := held_together(found, nodes):
            other = f", or {instead[name]}" if name in instead else ""
            said = (
                f"claim {name} is {trouble}, and the step that launches the training and its "
                f"{pods} pod(s) mount it at once"
            )
            if nodes is not None or trouble != "ReadWriteOnce":
                raise InputError(f"{said}: make it ReadWriteMany{other}")
            warnings.append(
                f"{said}, which works on one node only; how many there are cannot be seen here "
                f"(deploy/rbac/nodes): if several, make it ReadWriteMany{other}"
            )
    return warnings


def held_together(claim: Object, nodes: int | None) -> str:
    """The mode by which a claim holds its pods on one node; '' where that is no trouble.

    `nodes` is how many the cluster has, None where that is not known.
    """
    modes = _modes(claim["spec"]) | _modes(claim.get("status") or {})
    if modes & ON_MANY_NODES or not modes:
        return ""
    if modes == {"ReadWriteOncePod"}:
        return "ReadWriteOncePod"
    return "ReadWriteOnce" if nodes != 1 else ""


def _modes(part: Mapping[str, list[str]]) -> set[str]:
    return set(part.get("accessModes") or ())
