"""Check PVCs and storage classes: existing, bound, and mountable by all pods of a run at once."""

from collections.abc import Iterable, Mapping, Sequence

from kfp_ddp.checks.finding import ASK_ADMIN, CheckContext, Finding, Requirements, items
from kfp_ddp.core.errors import InputError, Problem
from kfp_ddp.core.text import plural
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.jobs.task import claims_by_volume
from kfp_ddp.k8s.api import Api, ApiError, Object
from kfp_ddp.k8s.objects import annotation, condition, phase
from kfp_ddp.k8s.resource import CLAIMS, JOBS, STORAGE_CLASSES, Resource

VOLUMES = Resource("v1", "persistentvolumes", namespaced=False)
ON_MANY_NODES = {"ReadWriteMany", "ReadOnlyMany"}
OWNER_JOBS = ("kfp-ddp-chown", "kfp-ddp-fsgroup")
"""Jobs that make new volumes writable for steps."""
DEFAULT = "storageclass.kubernetes.io/is-default-class"


def mounted_at_once(spec: LaunchSpec, work: str, data: str, publish: str) -> list[str]:
    """Return the PVCs that the step and its workers mount at once: not `data` that is copied."""
    own = {*spec.claims.values(), *claims_by_volume(spec.volumes).values()}
    names = {work, *(name.removesuffix(":ro") for name in own)}
    if publish in ("in-place", "none"):
        names.add(data)
    return sorted(names - {""})


def check_modes(
    api: Api, claims: Iterable[str], instead: Mapping[str, str], nodes: int | None, pods: int
) -> list[str]:
    """Return warnings, or raise InputError, where pods cannot mount a PVC at once.

    `instead` is an alternative to ReadWriteMany by PVC; `nodes` is None for an unknown number.
    """
    warnings = []
    for name in claims:
        try:
            claim = api.get(CLAIMS, name, retry=True)
        except ApiError:
            continue
        mode = single_node_mode(claim, nodes) if claim else ""
        if not mode:
            continue
        other = f", or {instead[name]}" if name in instead else ""
        message = (
            f"claim {name} is {mode}, and the step that launches the training and its "
            f"{plural(pods, 'pod')} mount it at once"
        )
        if nodes is not None or mode != "ReadWriteOnce":
            raise InputError(f"{message}: make it ReadWriteMany{other}")
        warnings.append(
            f"{message}, which works on one node only; the number of nodes cannot be seen "
            f"(deploy/rbac/nodes): if several, make it ReadWriteMany{other}"
        )
    return warnings


def single_node_mode(claim: Object, nodes: int | None) -> str:
    """Return the access mode that limits pods to one of `nodes`; '' if it is no problem."""
    status = claim.get("status") or {}
    modes = {*(claim["spec"].get("accessModes") or ()), *(status.get("accessModes") or ())}
    if modes == {"ReadWriteOncePod"}:
        return "ReadWriteOncePod"
    if nodes == 1 or modes & ON_MANY_NODES:
        return ""
    # Without any mode the claim is not known well enough.
    return "ReadWriteOnce" if modes else ""


def claims(cluster: CheckContext) -> list[Finding]:
    """Check that each PVC exists, can be bound, and can be mounted by all pods at once."""
    classes = items(cluster.api, STORAGE_CLASSES)
    run = cluster.run
    spec = LaunchSpec.create(image="any", nodes=run.nodes)
    shared = mounted_at_once(spec, run.work_claim, run.data_claim, run.publish)
    if run.backend == "local":
        shared = []  # one pod mounts all
    names = (run.data_claim, run.work_claim)
    findings = [_claim(cluster, name, classes, name in shared) for name in names]
    job = unfinished_owner(cluster.api)
    if job:
        message = f"steps may not be able to write: job {job} is not complete"
        remedy = f"kfp-ddp install -n {cluster.api.namespace}, with an --image that nodes can pull"
        findings.append(Finding("bad", "owner of volumes", message, remedy))
    return findings


def _claim(
    cluster: CheckContext, name: str, classes: Sequence[Object] | None, shared: bool
) -> Finding:
    """Check one PVC; `shared`: the launching step and the workers mount it at once."""
    what = f"claim {name}"
    try:
        claim = cluster.api.get(CLAIMS, name)
    except ApiError:
        return Finding("warn", what, "may not be read", ASK_ADMIN)
    if claim is None:
        return Finding("bad", what, "does not exist", _install_command(cluster, classes))
    problem = _binding_problem(cluster.api.namespace, claim, classes)
    if problem is None and shared:
        problem = _mounting_problem(cluster, claim)
    if problem is not None:
        return Finding("bad", what, problem.what, problem.remedy)
    modes = ", ".join(claim["spec"].get("accessModes") or [])
    return Finding("ok", what, f"{phase(claim)}, {modes}")


def _mounting_problem(cluster: CheckContext, claim: Object) -> Problem | None:
    """Return why several pods cannot mount a PVC at once; None if they can."""
    number = None if cluster.nodes is None else len(cluster.nodes)
    mode = single_node_mode(claim, number)
    if not mode:
        return None
    unseen = " (the number of nodes cannot be seen)" if number is None else ""
    is_data = claim["metadata"]["name"] == cluster.run.data_claim
    clone = ", or give --publish clone" if is_data else ""
    return Problem(
        f"is {mode}, and the launching step and the workers mount it at once, on any node{unseen}",
        f"create it again as ReadWriteMany{clone}",
    )


def _binding_problem(
    namespace: str, claim: Object, classes: Sequence[Object] | None
) -> Problem | None:
    """Return why a PVC has no volume; None if it has one, or will have it with its first pod."""
    name = claim["metadata"]["name"]
    describe = f"kubectl describe pvc -n {namespace} {name}"
    if claim["metadata"].get("deletionTimestamp"):
        return Problem("is being deleted", f"{describe} names its last pods")
    if phase(claim) == "Lost":
        return Problem("is Lost: its volume is gone", "delete it, and create it again")
    if phase(claim) != "Pending" or classes is None:
        return None
    known = {item["metadata"]["name"]: item for item in classes}
    class_name = claim["spec"].get("storageClassName") or ""
    if class_name and class_name not in known:
        return Problem(
            f"waits for the storage class {class_name}, which does not exist",
            f"delete it, and create it again with one of {', '.join(known)}",
        )
    if known.get(class_name, {}).get("volumeBindingMode") == "WaitForFirstConsumer":
        return None
    return Problem("is Pending", f"{describe} shows why")


def _install_command(cluster: CheckContext, classes: Sequence[Object] | None) -> str:
    """Return the command that creates the PVCs, with an existing storage class."""
    command = f"kfp-ddp install -n {cluster.api.namespace}"
    for name in ("data_claim", "work_claim"):
        if (claim := getattr(cluster.run, name)) != getattr(Requirements, name):
            command += f" --{name.replace('_', '-')} {claim}"
    if classes is None or any(map(is_default, classes)):
        return command
    if not classes:
        return f"install a CSI driver whose volumes many nodes can mount, then {command}"
    names = ", ".join(item["metadata"]["name"] for item in classes)
    return f"{command} --storage-class CLASS, one of {names}"


def unfinished_owner(api: Api) -> str:
    """Return the name of a job for volumes that exists and is not complete; '' for none."""
    for name in OWNER_JOBS:
        try:
            job = api.get(JOBS, name)
        except ApiError:
            continue
        if job and not condition(job, "Complete"):
            return name
    return ""


def storage(cluster: CheckContext) -> list[Finding]:
    """Report the storage classes, and the access modes of existing volumes."""
    what = "storage classes"
    classes = items(cluster.api, STORAGE_CLASSES)
    if classes is None:
        return [Finding("warn", what, "may not be listed", ASK_ADMIN)]
    if not classes:
        remedy = "install a CSI driver whose volumes many nodes can mount"
        return [Finding("warn", what, "none exist", remedy)]
    listed = ", ".join(map(_class_title, classes))
    modes: set[str] = set()
    for volume in items(cluster.api, VOLUMES) or ():
        modes.update(volume["spec"].get("accessModes") or ())
    in_use = f"; access modes in use: {', '.join(sorted(modes))}" if modes else ""
    return [Finding("ok", what, listed + in_use)]


def _class_title(item: Object) -> str:
    default = ", default" if is_default(item) else ""
    return f"{item['metadata']['name']} ({item['provisioner']}{default})"


def is_default(item: Object) -> bool:
    """Return whether a storage class is the cluster's default."""
    return annotation(item, DEFAULT) == "true"
