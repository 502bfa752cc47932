"""The claims of a run, and the storage classes that they come from."""

from collections.abc import Sequence
from pathlib import Path

from kfp_ddp.checks.doctor.finding import ASK_ADMIN, Asked, Finding, items
from kfp_ddp.checks.preflight.claims import held_together, mounted_at_once
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.k8s.api import Api, ApiError, Object, core
from kfp_ddp.k8s.objects import annotation, phase

CLASSES = "/apis/storage.k8s.io/v1/storageclasses"
DEFAULT = "storageclass.kubernetes.io/is-default-class"


def claims(api: Api, asked: Asked, nodes: Sequence[Object] | None) -> list[Finding]:
    """Whether each claim is there, can be bound, and be mounted by all that mount it at once."""
    classes = items(api, CLASSES)
    spec = LaunchSpec.create(image="any", nodes=asked.nodes)
    shared = mounted_at_once(spec, asked.work_claim, asked.data_claim, asked.publish)
    number = None if nodes is None else len(nodes)
    found = []
    for name in (asked.data_claim, asked.work_claim):
        what = f"claim {name}"
        try:
            claim = api.call("GET", core(api.namespace, "persistentvolumeclaims", name))
        except ApiError as error:
            if error.status != 404:
                found.append(Finding("warn", what, "may not be read", ASK_ADMIN))
            else:
                remedy = _make(api.namespace, asked.claims_file, classes)
                found.append(Finding("bad", what, "does not exist", remedy))
            continue
        said, remedy = _trouble(api.namespace, claim, classes)
        if not said and asked.backend != "local" and name in shared:
            said, remedy = _mode(claim, number, name == asked.data_claim)
        modes = ", ".join(claim["spec"].get("accessModes") or [])
        whole = f"{phase(claim)}, {modes}"
        found.append(Finding("bad" if said else "ok", what, said or whole, remedy))
    return found


def _trouble(namespace: str, claim: Object, classes: Sequence[Object] | None) -> tuple[str, str]:
    """Why no pod can mount a claim, and what to do; two empty texts if one can."""
    name = claim["metadata"]["name"]
    if claim["metadata"].get("deletionTimestamp"):
        return "is being deleted", f"kubectl describe pvc -n {namespace} {name} names its last pods"
    if phase(claim) == "Lost":
        return "is Lost: its volume is gone", "delete it, and make it anew"
    if phase(claim) != "Pending" or classes is None:
        return "", ""
    known = {each["metadata"]["name"]: each for each in classes}
    wanted = claim["spec"].get("storageClassName")
    if wanted and wanted not in known:
        return (
            f"waits for the storage class {wanted}, which is not there",
            f"delete it, and make it anew with one of {_names(classes)}",
        )
    if known.get(wanted or "", {}).get("volumeBindingMode") == "WaitForFirstConsumer":
        return "", ""
    return "is Pending", f"kubectl describe pvc -n {namespace} {name} says why"


def _mode(claim: Object, nodes: int | None, copied: bool) -> tuple[str, str]:
    mode = held_together(claim, nodes)
    if not mode:
        return "", ""
    said = f"is {mode}, and the launching step and the workers mount it at once, on whatever node"
    if nodes is None:
        said += " (how many there are may not be seen)"
    remedy = "make it anew as ReadWriteMany"
    return said, f"{remedy}, or give --publish clone" if copied else remedy


def _make(namespace: str, file: Path, classes: Sequence[Object] | None) -> str:
    """How to make the claims, with a class that is there."""
    apply = f"kubectl apply -n {namespace} -f {file}"
    wanted = _class_of(file)
    if classes is None or not wanted or wanted in {each["metadata"]["name"] for each in classes}:
        return apply
    if not classes:
        return f"install a CSI driver whose volumes many nodes can mount, then {apply}"
    return (
        f"set storageClassName in {file}, now {wanted}, to one of {_names(classes)}, then {apply}"
    )


def _class_of(file: Path) -> str:
    """The storage class that a file of claims names; '' where there is no such file."""
    import yaml

    try:
        documents = list(yaml.safe_load_all(file.read_text()))
    except (OSError, yaml.YAMLError):
        return ""
    named = (each["spec"].get("storageClassName") for each in documents if each)
    return str(next(filter(None, named), ""))


def storage(api: Api) -> Finding:
    """The storage classes, and the access modes that volumes have here."""
    classes = items(api, CLASSES)
    if classes is None:
        return Finding("warn", "storage classes", "may not be listed", ASK_ADMIN)
    if not classes:
        remedy = "install a CSI driver whose volumes many nodes can mount"
        return Finding("warn", "storage classes", "there are none", remedy)
    volumes = items(api, "/api/v1/persistentvolumes") or ()
    modes = sorted({mode for each in volumes for mode in each["spec"].get("accessModes", [])})
    seen = f"; access modes in use: {', '.join(modes)}" if modes else ""
    return Finding("ok", "storage classes", ", ".join(map(_class_title, classes)) + seen)


def _names(classes: Sequence[Object]) -> str:
    return ", ".join(each["metadata"]["name"] for each in classes)


def _class_title(item: Object) -> str:
    default = ", default" if is_default(item) else ""
    return f"{item['metadata']['name']} ({item['provisioner']}{default})"


def is_default(item: Object) -> bool:
    """Whether claims that name no class are of this one."""
    return annotation(item, DEFAULT) == "true"
