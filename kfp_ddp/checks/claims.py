"""Check PVCs and storage classes: existing, bound, and mountable by all pods of a run at once."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from kfp_ddp.checks.finding import ASK_ADMIN, Cluster, Finding, items
from kfp_ddp.core.errors import InputError
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.jobs.task import by_volume
from kfp_ddp.k8s.api import Api, ApiError, Object, core
from kfp_ddp.k8s.objects import annotation, phase

ON_MANY_NODES = {"ReadWriteMany", "ReadOnlyMany"}
CLASSES = "/apis/storage.k8s.io/v1/storageclasses"
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
                f"{pods} pod(s) mount it at once"
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
                remedy = _create_command(api.namespace, run.claims_file, classes)
                findings.append(Finding("bad", what, "does not exist", remedy))
            continue
        problem, remedy = _problem(api.namespace, claim, classes)
        if not problem and run.backend != "local" and name in shared:
            problem, remedy = _mode_problem(claim, number, name == run.data_claim)
        modes = ", ".join(claim["spec"].get("accessModes") or [])
        message = problem or f"{phase(claim)}, {modes}"
        findings.append(Finding("bad" if problem else "ok", what, message, remedy))
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


def _create_command(namespace: str, file: Path, classes: Sequence[Object] | None) -> str:
    """Return how to create the PVCs with an existing storage class."""
    apply = f"kubectl apply -n {namespace} -f {file}"
    name = _class_of(file)
    if classes is None or not name or name in {item["metadata"]["name"] for item in classes}:
        return apply
    if not classes:
        return f"install a CSI driver whose volumes many nodes can mount, then {apply}"
    return f"set storageClassName in {file}, now {name}, to one of {_names(classes)}, then {apply}"


def _class_of(file: Path) -> str:
    """Return the storage class in a file of PVCs; '' if the file cannot be read."""
    import yaml

    try:
        documents = list(yaml.safe_load_all(file.read_text()))
    except (OSError, yaml.YAMLError):
        return ""
    names = (document["spec"].get("storageClassName") for document in documents if document)
    return str(next(filter(None, names), ""))


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
    return [Finding("ok", what, ", ".join(map(_class_title, classes)) + in_use)]


def _names(classes: Sequence[Object]) -> str:
    return ", ".join(item["metadata"]["name"] for item in classes)


def _class_title(item: Object) -> str:
    default = ", default" if is_default(item) else ""
    return f"{item['metadata']['name']} ({item['provisioner']}{default})"


def is_default(item: Object) -> bool:
    """Return whether a storage class is the cluster's default."""
    return annotation(item, DEFAULT) == "true"
