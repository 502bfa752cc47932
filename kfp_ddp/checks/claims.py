"""Check PVCs and storage classes: existing, bound, and mountable by all pods of a run at once."""

from collections.abc import Iterable, Mapping, Sequence

from kfp_ddp.checks.finding import ASK_ADMIN, CheckContext, Finding, Requirements, items
from kfp_ddp.core.errors import InputError
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
    return sorted((names | {data} if publish in ("in-place", "none") else names) - {""})


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
        if claim and (mode := single_node_mode(claim, nodes)):
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
    parts = (claim["spec"], claim.get("status") or {})
    modes = {mode for part in parts for mode in part.get("accessModes") or ()}
    if modes == {"ReadWriteOncePod"}:
        return "ReadWriteOncePod"
    return "ReadWriteOnce" if modes and not modes & ON_MANY_NODES and nodes != 1 else ""


def claims(cluster: CheckContext) -> list[Finding]:
    """Check that each PVC exists, can be bound, and can be mounted by all pods at once."""
    api, run = cluster.api, cluster.run
    classes = items(api, STORAGE_CLASSES)
    spec = LaunchSpec.create(image="any", nodes=run.nodes)
    shared = mounted_at_once(spec, run.work_claim, run.data_claim, run.publish)
    number = None if cluster.nodes is None else len(cluster.nodes)
    findings = []
    for name in (run.data_claim, run.work_claim):
        what = f"claim {name}"
        try:
            claim = api.get(CLAIMS, name)
        except ApiError:
            findings.append(Finding("warn", what, "may not be read", ASK_ADMIN))
            continue
        if claim is None:
            remedy = _install_command(cluster, classes)
            findings.append(Finding("bad", what, "does not exist", remedy))
            continue
        problem, remedy = _problem(api.namespace, claim, classes)
        mode = single_node_mode(claim, number)
        if mode and not problem and run.backend != "local" and name in shared:
            where = "on any node" + " (the number of nodes cannot be seen)" * (number is None)
            problem = f"is {mode}, and the launching step and the workers mount it at once, {where}"
            clone = ", or give --publish clone" if name == run.data_claim else ""
            remedy = f"create it again as ReadWriteMany{clone}"
        modes = ", ".join(claim["spec"].get("accessModes") or [])
        message = problem or f"{phase(claim)}, {modes}"
        findings.append(Finding("bad" if problem else "ok", what, message, remedy))
    if job := unfinished_owner(api):
        message = f"steps may not be able to write: job {job} is not complete"
        remedy = f"kfp-ddp install -n {api.namespace}, with an --image that nodes can pull"
        findings.append(Finding("bad", "owner of volumes", message, remedy))
    return findings


def _problem(namespace: str, claim: Object, classes: Sequence[Object] | None) -> tuple[str, str]:
    """Return why a PVC cannot be mounted, and the remedy; both '' if it can."""
    name = claim["metadata"]["name"]
    if claim["metadata"].get("deletionTimestamp"):
        return "is being deleted", f"kubectl describe pvc -n {namespace} {name} names its last pods"
    if phase(claim) == "Lost":
        return "is Lost: its volume is gone", "delete it, and create it again"
    if phase(claim) != "Pending" or classes is None:
        return "", ""
    known = {item["metadata"]["name"]: item for item in classes}
    class_name = claim["spec"].get("storageClassName")
    if class_name and class_name not in known:
        problem = f"waits for the storage class {class_name}, which does not exist"
        return problem, f"delete it, and create it again with one of {', '.join(known)}"
    if known.get(class_name or "", {}).get("volumeBindingMode") == "WaitForFirstConsumer":
        return "", ""
    return "is Pending", f"kubectl describe pvc -n {namespace} {name} shows why"


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
    what, classes = "storage classes", items(cluster.api, STORAGE_CLASSES)
    if classes is None:
        return [Finding("warn", what, "may not be listed", ASK_ADMIN)]
    if not classes:
        remedy = "install a CSI driver whose volumes many nodes can mount"
        return [Finding("warn", what, "none exist", remedy)]
    volumes = items(cluster.api, VOLUMES) or ()
    modes = sorted({mode for one in volumes for mode in one["spec"].get("accessModes") or ()})
    in_use = f"; access modes in use: {', '.join(modes)}" if modes else ""
    titles = [
        f"{item['metadata']['name']} ({item['provisioner']}{', default' * is_default(item)})"
        for item in classes
    ]
    return [Finding("ok", what, ", ".join(titles) + in_use)]


def is_default(item: Object) -> bool:
    """Return whether a storage class is the cluster's default."""
    return annotation(item, DEFAULT) == "true"
