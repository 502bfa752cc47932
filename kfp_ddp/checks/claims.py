"""Check PVCs and storage classes: existing, bound, and mountable by all pods of a run at once."""

from collections.abc import Iterable, Mapping, Sequence

from kfp_ddp.checks.finding import ASK_ADMIN, Cluster, Finding, Requirements, items
from kfp_ddp.core.errors import InputError
from kfp_ddp.core.text import plural
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.jobs.task import by_volume
from kfp_ddp.k8s.api import Api, ApiError, Object, core, custom
from kfp_ddp.k8s.objects import annotation, condition, phase

ON_MANY_NODES = {"ReadWriteMany", "ReadOnlyMany"}
CLASSES = "/apis/storage.k8s.io/v1/storageclasses"
OWNER_JOBS = ("kfp-ddp-chown", "kfp-ddp-fsgroup")
"""Jobs that make new volumes writable for steps."""
DEFAULT = "storageclass.kubernetes.io/is-default-class"


def mounted_at_once(spec: LaunchSpec, work: str, data: str, publish: str) -> list[str]:
    """Return the PVCs that the launching step and the workers mount at the same time.

    These are `work`, those of the job, and `data` unless a copy replaces it; '' is no PVC.
    """
    own = {*spec.claims.values(), *by_volume(spec.volumes).values()}
    names = {work, *(name.removesuffix(":ro") for name in own)}
    return sorted((names | {data} if publish in ("in-place", "none") else names) - {""})


def check_modes(
    api: Api, claims: Iterable[str], instead: Mapping[str, str], nodes: int | None, pods: int
) -> list[str]:
    """Check that the pods of a run can mount its PVCs on several nodes.

    Args:
        api: API of the cluster; PVCs that may not be read are skipped.
        claims: Result of `mounted_at_once`.
        instead: Alternative to a ReadWriteMany PVC, by name of the PVC.
        nodes: Number of nodes; None if not known, then a PVC of one node is a warning.
        pods: Number of pods of the job.

    Raises:
        InputError: A PVC cannot be mounted by all pods.
    """
    warnings = []
    for name in claims:
        try:
            claim = api.call("GET", core(api.namespace, "persistentvolumeclaims", name), retry=True)
        except ApiError:
            continue
        if mode := single_node_mode(claim, nodes):
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
    modes = _modes(claim["spec"]) | _modes(claim.get("status") or {})
    if modes & ON_MANY_NODES or not modes:
        return ""
    if modes == {"ReadWriteOncePod"}:
        return "ReadWriteOncePod"
    return "ReadWriteOnce" if nodes != 1 else ""


def _modes(part: Mapping[str, list[str]]) -> set[str]:
    return set(part.get("accessModes") or ())


def claims(cluster: Cluster) -> list[Finding]:
    """Check that each PVC exists, can be bound, and can be mounted by all pods at once."""
    api, run = cluster.api, cluster.run
    classes = items(api, CLASSES)
    spec = LaunchSpec.create(image="any", nodes=run.nodes)
    shared = mounted_at_once(spec, run.work_claim, run.data_claim, run.publish)
    number = None if cluster.nodes is None else len(cluster.nodes)
    findings = []
    for name in (run.data_claim, run.work_claim):
        what = f"claim {name}"
        try:
            claim = api.call("GET", core(api.namespace, "persistentvolumeclaims", name))
        except ApiError as error:
            if error.status != 404:
                findings.append(Finding("warn", what, "may not be read", ASK_ADMIN))
            else:
                remedy = _install_command(cluster, classes)
                findings.append(Finding("bad", what, "does not exist", remedy))
            continue
        problem, remedy = _problem(api.namespace, claim, classes)
        if not problem and run.backend != "local" and name in shared:
            problem, remedy = _mode_problem(claim, number, name == run.data_claim)
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
        return (
            f"waits for the storage class {class_name}, which does not exist",
            f"delete it, and create it again with one of {_names(classes)}",
        )
    if known.get(class_name or "", {}).get("volumeBindingMode") == "WaitForFirstConsumer":
        return "", ""
    return "is Pending", f"kubectl describe pvc -n {namespace} {name} shows why"


def _mode_problem(claim: Object, nodes: int | None, copied: bool) -> tuple[str, str]:
    mode = single_node_mode(claim, nodes)
    if not mode:
        return "", ""
    message = f"is {mode}, and the launching step and the workers mount it at once, on any node"
    if nodes is None:
        message += " (the number of nodes cannot be seen)"
    remedy = "create it again as ReadWriteMany"
    return message, f"{remedy}, or give --publish clone" if copied else remedy


def _install_command(cluster: Cluster, classes: Sequence[Object] | None) -> str:
    """Return the command that creates the PVCs, with an existing storage class."""
    run, default = cluster.run, Requirements()
    command = f"kfp-ddp install -n {cluster.api.namespace}"
    if run.data_claim != default.data_claim:
        command += f" --data-claim {run.data_claim}"
    if run.work_claim != default.work_claim:
        command += f" --work-claim {run.work_claim}"
    if classes is None or any(map(is_default, classes)):
        return command
    if not classes:
        return f"install a CSI driver whose volumes many nodes can mount, then {command}"
    return f"{command} --storage-class CLASS, one of {_names(classes)}"


def unfinished_owner(api: Api) -> str:
    """Return the name of a job for volumes that exists and is not complete; '' for none."""
    for name in OWNER_JOBS:
        try:
            job = api.call("GET", custom("batch/v1", api.namespace, "jobs", name))
        except ApiError:
            continue
        if not condition(job, "Complete"):
            return name
    return ""


def storage(cluster: Cluster) -> list[Finding]:
    """Report the storage classes, and the access modes of existing volumes."""
    what, classes = "storage classes", items(cluster.api, CLASSES)
    if classes is None:
        return [Finding("warn", what, "may not be listed", ASK_ADMIN)]
    if not classes:
        remedy = "install a CSI driver whose volumes many nodes can mount"
        return [Finding("warn", what, "none exist", remedy)]
    volumes = items(cluster.api, "/api/v1/persistentvolumes") or ()
    modes = sorted({mode for volume in volumes for mode in _modes(volume["spec"])})
    in_use = f"; access modes in use: {', '.join(modes)}" if modes else ""
    titles = [
        f"{item['metadata']['name']} ({item['provisioner']}{', default' * is_default(item)})"
        for item in classes
    ]
    return [Finding("ok", what, ", ".join(titles) + in_use)]


def _names(classes: Sequence[Object]) -> str:
    return ", ".join(item["metadata"]["name"] for item in classes)


def is_default(item: Object) -> bool:
    """Return whether a storage class is the cluster's default."""
    return annotation(item, DEFAULT) == "true"
