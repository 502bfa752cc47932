"""What `kfp-ddp doctor` looks at, in the order in which it is told."""

import importlib.metadata
import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Literal

from kfp_ddp.base.errors import KfpDdpError
from kfp_ddp.components.shared.cluster.api import Api, ApiError, Object, core, review
from kfp_ddp.components.shared.launch import kueue
from kfp_ddp.components.shared.launch.specification.kinds import KINDS, Kind
from kfp_ddp.components.shared.launch.specification.launch_spec import is_gpu

CLAIMS = ("kfp-ddp-data", "kfp-ddp-work")
"""Those that train_resnet uses if it is not told otherwise."""
ASK_ADMIN = "ask an administrator of the cluster, or run it as one"
"""The remedy where what is looked at may not be read."""
# Every right that a launch uses: group, resource, verbs, and whether it fails without it.
RIGHTS = (
    ("kubeflow.org", "pytorchjobs", "create get list watch patch delete", True),
    ("trainer.kubeflow.org", "trainjobs", "create get list watch patch delete", False),
    ("kubeflow.org", "tfjobs", "create get list watch patch delete", False),
    ("kubeflow.org", "mpijobs", "create get list watch patch delete", False),
    ("", "pods", "get list watch", True),
    ("", "pods/log", "get", True),
    ("argoproj.io", "workflows", "get list watch", True),
    ("", "persistentvolumeclaims", "get", True),
    ("", "events", "list watch", False),
    ("", "configmaps", "create", False),
)
COPY_RIGHTS = (("", "persistentvolumeclaims", "create list patch delete", False),)
# And with Kueue, to say what a job waits for.
KUEUE_RIGHTS = (
    (kueue.GROUP, "localqueues", "get", False),
    (kueue.GROUP, "workloads", "list", False),
)


@dataclass(frozen=True)
class Finding:
    """What a check found: its state, what was looked at, what was found and a remedy."""

    state: Literal["ok", "bad", "warn"]
    what: str
    said: str
    remedy: str = ""


def examine(namespace: str, service_account: str, host: str) -> list[Finding]:
    """All findings for the current context."""
    try:
        api = Api.connect(namespace)
        version = api.call("GET", "/version")
    except KfpDdpError as error:
        remedy = "check `kubectl cluster-info` and KUBECONFIG"
        unreachable = Finding("bad", "API server", str(error).splitlines()[0], remedy)
        return [unreachable, kfp_server(host)] if host else [unreachable]
    found = [Finding("ok", "API server", f"Kubernetes {version['gitVersion']}")]
    found += operators(api)
    found += rights(api, service_account)
    found += copy_rights(api, service_account)
    found += [claim(api, name) for name in CLAIMS]
    found.append(storage(api))
    found.append(gpus(api))
    found += queues(api)
    found.append(kfp_server(host))
    return found


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


def rights(api: Api, service_account: str) -> list[Finding]:
    """One finding for each resource that a launch uses, with the verbs that lack."""
    try:
        wanted = (*RIGHTS, *KUEUE_RIGHTS) if kueue.group_version(api) else RIGHTS
    except ApiError:
        wanted = RIGHTS
    remedy = f"kubectl apply -n {api.namespace} -k deploy/rbac"
    return _lacking(api, service_account, wanted, "rights on", remedy)


def copy_rights(api: Api, service_account: str) -> list[Finding]:
    """The same for what dataset_volume needs, unless publish is in-place."""
    remedy = f"set namespace: {api.namespace} in deploy/storage and apply it; see deploy/README.md"
    return _lacking(api, service_account, COPY_RIGHTS, "rights to copy", remedy)


def _lacking(
    api: Api,
    service_account: str,
    rights: tuple[tuple[str, str, str, bool], ...],
    title: str,
    remedy: str,
) -> list[Finding]:
    who = f"system:serviceaccount:{api.namespace}:{service_account}" if service_account else ""
    found = []
    for group, resource, verbs, needed in rights:
        plural, _, sub = resource.partition("/")
        try:
            lacking = [v for v in verbs.split() if not review(api, v, group, plural, sub, who)]
        except ApiError as error:
            said = f"cannot be asked for: {' '.join(error.message.split())}"
            remedy = "run it as somebody who may create subjectaccessreviews"
            return [Finding("warn", "rights", said, remedy)]
        what = f"{title} {resource}"
        if not lacking:
            found.append(Finding("ok", what, verbs.replace(" ", ", ")))
            continue
        said = f"no right to {', '.join(lacking)} in {api.namespace}"
        found.append(Finding("bad" if needed else "warn", what, said, remedy))
    return found


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
    classes = _items(api, "/apis/storage.k8s.io/v1/storageclasses")
    if classes is None:
        return Finding("warn", "storage classes", "may not be listed", ASK_ADMIN)
    names = [_class_title(each) for each in classes]
    if not names:
        remedy = "install a CSI driver whose volumes many nodes can mount"
        return Finding("bad", "storage classes", "there are none", remedy)
    volumes = _items(api, "/api/v1/persistentvolumes") or ()
    modes = sorted({mode for each in volumes for mode in each["spec"].get("accessModes", [])})
    seen = f"; access modes in use: {', '.join(modes)}" if modes else ""
    return Finding("ok", "storage classes", ", ".join(names) + seen)


def _class_title(item: Object) -> str:
    notes = item["metadata"].get("annotations") or {}
    default = notes.get("storageclass.kubernetes.io/is-default-class") == "true"
    return f"{item['metadata']['name']} ({item['provisioner']}{', default' if default else ''})"


def _items(api: Api, path: str) -> list[Object] | None:
    """What a collection holds; None where it may not be listed."""
    try:
        items: list[Object] = api.call("GET", path)["items"]
    except ApiError:
        return None
    return items


def gpus(api: Api) -> Finding:
    """The GPUs of all nodes."""
    nodes = _items(api, "/api/v1/nodes")
    if nodes is None:
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


def kfp_server(host: str) -> Finding:
    """The KFP API server's version against the SDK's; only where a host is given."""
    sdk = importlib.metadata.version("kfp")
    if not host:
        return Finding("warn", "KFP", f"SDK {sdk}; the API server was not asked", "give --host")
    if not host.startswith(("http://", "https://")):
        remedy = "give one as http://localhost:8888"
        return Finding("bad", "KFP", f"{host} is not an http(s) URL", remedy)
    url = f"{host.rstrip('/')}/apis/v2beta1/healthz"
    forward = "kubectl port-forward -n kubeflow svc/ml-pipeline 8888; --host http://localhost:8888"
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310
            server = str(json.load(answer)["tag_name"])
    except urllib.error.HTTPError as error:
        error.close()
        said = f"{url} answers {error.code} {error.reason}"
        return Finding("bad", "KFP", said, f"bypass the login: {forward}")
    except OSError as error:
        reason = getattr(error, "reason", error)
        return Finding("bad", "KFP", f"{url} does not answer ({reason})", forward)
    except (ValueError, KeyError, TypeError):
        said = f"{url} is not answered by a KFP API server"
        return Finding("bad", "KFP", said, f"if it is a login page, bypass it: {forward}")
    if server.lstrip("v").split(".")[:2] == sdk.split(".")[:2]:
        return Finding("ok", "KFP", f"SDK {sdk}, API server {server}")
    said = f"SDK {sdk}, API server of {server} version"
    if server != "unknown":  # what a server says that was built without its tag
        said = f"SDK {sdk}, API server {server}"
    return Finding("warn", "KFP", said, "use an SDK of the server's minor version")
