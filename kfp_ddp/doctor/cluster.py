"""What the cluster has for a run: operators, claims, storage, GPUs and queues."""

from kfp_ddp.components.shared.cluster.api import Api, ApiError, Object, core
from kfp_ddp.components.shared.launch import kueue
from kfp_ddp.components.shared.launch.specification.kinds import KINDS, Kind
from kfp_ddp.components.shared.launch.specification.launch_spec import is_gpu
from kfp_ddp.doctor.finding import ASK_ADMIN, Finding


def operators(api: Api) -> list[Finding]:
    """The operators, by the resources they serve; one of the two for PyTorch is enough."""
    served = {name: _served(api, kind) for name, kind in KINDS.items()}
    torch = served["pytorchjob"] or served["trainjob"]
    found = []
    for name, kind in KINDS.items():
        if served[name]:
            found.append(Finding("ok", kind.title, served[name]))
            continue
        group, _, version = kind.group_version.partition("/")
        said = f"{kind.plural}.{group}/{version} is not served"
        bad = name == "pytorchjob" and not torch
        remedy = f"install {kind.operator}"
        if name == "pytorchjob" and torch:
            remedy += ", or use backend=trainjob"
        found.append(Finding("bad" if bad else "warn", kind.title, said, remedy))
    return found


def _served(api: Api, kind: Kind) -> str:
    """The versions of a kind's group, where the group serves the kind; otherwise ''."""
    group = kind.group_version.partition("/")[0]
    try:
        versions = [each["version"] for each in api.call("GET", f"/apis/{group}")["versions"]]
        names = api.call("GET", f"/apis/{kind.group_version}")["resources"]
    except ApiError:
        return ""
    there = any(each["name"] == kind.plural for each in names)
    return f"{group}/{', '.join(versions)}" if there else ""


def claim(api: Api, name: str) -> Finding:
    """Whether a claim is there, and how it may be mounted."""
    try:
        found = api.call("GET", core(api.namespace, "persistentvolumeclaims", name))
    except ApiError as error:
        if error.status != 404:
            return Finding("warn", f"claim {name}", "may not be read", ASK_ADMIN)
        remedy = f"kubectl apply -n {api.namespace} -f deploy/storage/claims.yaml, or name others"
        return Finding("warn", f"claim {name}", "does not exist", remedy)
    modes = ", ".join(found["spec"].get("accessModes") or [])
    return Finding("ok", f"claim {name}", f"{found['status'].get('phase', '')}, {modes}")


def storage(api: Api) -> Finding:
    """The storage classes, and the access modes that volumes have here."""
    try:
        classes = api.call("GET", "/apis/storage.k8s.io/v1/storageclasses")["items"]
    except ApiError:
        return Finding("warn", "storage classes", "may not be listed", ASK_ADMIN)
    names = [_class_title(each) for each in classes]
    if not names:
        remedy = "install a CSI driver whose volumes many nodes can mount"
        return Finding("bad", "storage classes", "there are none", remedy)
    modes = sorted({m for volume in _volumes(api) for m in volume["spec"].get("accessModes", [])})
    seen = f"; access modes in use: {', '.join(modes)}" if modes else ""
    return Finding("ok", "storage classes", ", ".join(names) + seen)


def _class_title(item: Object) -> str:
    notes = item["metadata"].get("annotations") or {}
    default = notes.get("storageclass.kubernetes.io/is-default-class") == "true"
    return f"{item['metadata']['name']} ({item['provisioner']}{', default' if default else ''})"


def _volumes(api: Api) -> list[Object]:
    try:
        items: list[Object] = api.call("GET", "/api/v1/persistentvolumes")["items"]
    except ApiError:
        return []
    return items


def gpus(api: Api) -> Finding:
    """The GPUs of all nodes."""
    try:
        nodes = api.call("GET", "/api/v1/nodes")["items"]
    except ApiError:
        return Finding("warn", "GPUs", "nodes may not be listed", "apply deploy/rbac/nodes")
    counts: dict[str, int] = {}
    for node in nodes:
        for name, count in (node["status"].get("allocatable") or {}).items():
            if is_gpu(name):
                counts[name] = counts.get(name, 0) + int(count)
    if not any(counts.values()):
        return Finding("warn", "GPUs", "no node has one", "training runs on CPUs, with gloo")
    return Finding("ok", "GPUs", ", ".join(f"{n} {name}" for name, n in sorted(counts.items())))


def queues(api: Api) -> list[Finding]:
    """Queues of Kueue and Volcano, where they are installed."""
    found = []
    for title in ("Kueue", "Volcano"):
        path = "/apis/scheduling.volcano.sh/v1beta1/queues"
        try:
            if title == "Kueue":
                path = kueue.path(api, "localqueues")
            items = api.call("GET", path)["items"] if path else None
        except ApiError as error:
            if error.status != 404:
                found.append(Finding("warn", f"queues of {title}", "may not be listed", ASK_ADMIN))
            continue
        if items is not None:
            found.append(_queues_of(title, items, api.namespace))
    return found


def _queues_of(title: str, items: list[Object], namespace: str) -> Finding:
    names = []
    stopped = False
    for item in items:
        trouble = kueue.inactive(item)
        stopped = stopped or bool(trouble)
        names.append(item["metadata"]["name"] + (f" ({trouble})" if trouble else ""))
    what = f"queues of {title}"
    if not names:
        remedy = f"make a LocalQueue in {namespace}" if title == "Kueue" else "make a Queue"
        return Finding("warn", what, "there are none", remedy)
    if stopped:
        remedy = "kubectl describe localqueues and its ClusterQueue"
        return Finding("warn", what, ", ".join(names), remedy)
    return Finding("ok", what, ", ".join(names))
