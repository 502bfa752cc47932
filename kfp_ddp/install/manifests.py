"""The objects of an installation, as deploy/ has them, for a namespace and its options."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kfp_ddp.checks.claims import is_default
from kfp_ddp.checks.finding import Requirements, items
from kfp_ddp.core.config import setting
from kfp_ddp.core.container_images import check_image
from kfp_ddp.core.errors import InputError
from kfp_ddp.core.settings import hint
from kfp_ddp.jobs.shipping.own_package import config_map, map_name
from kfp_ddp.k8s.api import Api, ApiError, Object
from kfp_ddp.k8s.objects import DESCRIPTIONS, NAME, NAMESPACE, SIZE
from kfp_ddp.k8s.resource import NAMESPACES, STORAGE_CLASSES

DEPLOY = Path(__file__).parents[1] / "deploy"
CLUSTER_KINDS = ("ClusterRole", "ClusterRoleBinding")
PART_OF = {"app.kubernetes.io/part-of": "kfp-ddp"}
OWNERS = {"root": "chown.yaml", "group": "fsgroup.yaml"}
"""The job that makes new volumes writable: as root, or by the group of its pod."""
# Drivers whose volumes only one node can mount, in any access mode.
SINGLE_NODE_DRIVERS = (
    *("pd.csi.storage.gke.io", "ebs.csi.aws.com", "disk.csi.azure.com", "kubernetes.io/gce-pd"),
    *("rancher.io/local-path", "kubernetes.io/aws-ebs", "kubernetes.io/azure-disk"),
)
FORMS = {
    "namespace": NAMESPACE,
    "storage_class": NAME,
    "size": SIZE,
    "data_claim": NAME,
    "work_claim": NAME,
}
"""Pattern of each option that Kubernetes has one for."""


@dataclass(frozen=True)
class Installation:
    """What to install into a namespace."""

    namespace: str
    storage_class: str = setting("", "Storage class of the PVCs; empty for the cluster's default.")
    access_mode: Literal["ReadWriteMany", "ReadWriteOnce"] = setting(
        "ReadWriteMany", "Access mode of the PVCs; ReadWriteOnce requires all pods on one node."
    )
    size: str = setting(
        "50Gi", "Size of each PVC. Filestore has at least 1Ti; most classes can grow it later."
    )
    data_claim: str = Requirements.data_claim
    """Empty for none, also for `work_claim`."""
    work_claim: str = Requirements.work_claim
    see_nodes: bool = setting(True, "Permission to read the GPUs of nodes, for gpus_per_node=-1.")
    copies: bool = setting(False, "Permissions for publish=clone, snapshot and auto.")
    divide_accounts: bool = setting(
        False, "Accounts kfp-ddp-steps, for runs, and kfp-ddp-launcher, which launches their jobs."
    )
    network_policy: bool = setting(False, "NetworkPolicies: only the connections that runs need.")
    egress_ports: tuple[int, ...] = ()
    """Further TCP ports that the policies allow to any address."""
    image: str = setting(
        "", "Image of the job for volumes, with sh and chown; empty for the launcher."
    )
    source: bool = True
    """Whether pods of public images take the source from a ConfigMap."""
    pip_index_url: str = ""
    pip_proxy: str = ""

    @property
    def claims(self) -> dict[str, str]:
        """Name of each PVC by its name in the files."""
        names = {Requirements.data_claim: self.data_claim, Requirements.work_claim: self.work_claim}
        return {file: name for file, name in names.items() if name}


def check_options(target: Installation) -> None:
    """Raise InputError for a name, size or image that Kubernetes would refuse."""
    for name, pattern in FORMS.items():
        given = getattr(target, name)
        if not re.fullmatch(pattern, given):
            option = f"--{name.replace('_', '-')}"
            raise InputError(
                f"{option} {given} cannot be used: it should be {DESCRIPTIONS[pattern]}"
            )
    check_image("--image", target.image)


def check(api: Api, target: Installation) -> None:
    """Raise InputError if an option is invalid, or namespace or storage class does not exist."""
    check_options(target)
    try:
        namespace = api.get(NAMESPACES, target.namespace)
    except ApiError as error:
        # Without the right to read it, it may exist.
        if error.status != 403:
            raise
    else:
        if namespace is None:
            raise _no_namespace(api, target.namespace)
    classes = items(api, STORAGE_CLASSES) if target.claims else None
    if classes is not None:
        _check_class(target, classes)


def _no_namespace(api: Api, name: str) -> InputError:
    names = [item["metadata"]["name"] for item in items(api, NAMESPACES) or ()]
    near = hint(name, names) or "; create it, or give another by -n"
    return InputError(f"namespace {name} does not exist{near}")


def _check_class(target: Installation, classes: Sequence[Object]) -> None:
    """Raise InputError for a storage class that does not exist, or not for many nodes."""
    known = {item["metadata"]["name"]: item for item in classes}
    defaults = [name for name, item in known.items() if is_default(item)]
    name = target.storage_class
    if not name and defaults:
        name = defaults[0]
    listed = ", ".join(known) or "none: install a CSI driver"
    if not name:
        raise InputError(f"no storage class is the default; give --storage-class, one of {listed}")
    if name not in known:
        near = hint(name, [*known]) or f"; it is one of {listed}"
        raise InputError(f"storage class {name} does not exist{near}")
    driver = known[name].get("provisioner")
    if target.access_mode == "ReadWriteMany" and driver in SINGLE_NODE_DRIVERS:
        raise InputError(
            f"storage class {name} ({driver}) creates volumes for one node only; give a class of "
            "NFS, Filestore, EFS or CephFS, or --access-mode ReadWriteOnce for runs on one node"
        )


def manifests(target: Installation) -> list[Object]:
    """Return all objects but the job for volumes and the LimitRange, roles before bindings."""
    objects: list[Object] = []
    for folder in _folders(target):
        (kustomization,) = read(DEPLOY / folder / "kustomization.yaml")
        for name in kustomization["resources"]:
            documents = read(DEPLOY / folder / name)
            objects += [into(document, target.namespace) for document in documents]
    _allow_ports(objects, target.egress_ports)
    objects.sort(key=lambda document: document["kind"].endswith("Binding"))
    if target.source:
        source = config_map(map_name(), target.pip_index_url, target.pip_proxy)
        objects.insert(0, into(source, target.namespace))
    return [*claims(target), *objects]


def _folders(target: Installation) -> list[str]:
    """Return the folders of deploy/ that an installation takes objects of."""
    folders = ["rbac", "eviction"]
    if target.see_nodes:
        folders.append("rbac/nodes")
    if target.divide_accounts:
        folders.append("rbac/divided")
    # The stock account has rights on PVCs by KFP's own manifests.
    if target.divide_accounts or target.copies:
        folders.append("storage")
    if target.network_policy or target.egress_ports:
        folders.append("network")
    return folders


def _allow_ports(objects: list[Object], ports: tuple[int, ...]) -> None:
    """Let the network policies admit connections to these ports of any address."""
    if not ports:
        return
    policies = [document["spec"] for document in objects if document["kind"] == "NetworkPolicy"]
    for policy in policies:
        if "Egress" in policy["policyTypes"]:
            policy["egress"].append({"ports": [{"port": port} for port in ports]})


def claims(target: Installation) -> list[Object]:
    """Return the PVCs with the requested class, size and mode."""
    objects = []
    for claim in read(DEPLOY / "storage" / "claims.yaml"):
        file = claim["metadata"]["name"]
        spec = claim["spec"]
        if file not in target.claims:
            continue
        claim["metadata"]["name"] = target.claims[file]
        spec["accessModes"] = [target.access_mode]
        spec["resources"]["requests"]["storage"] = target.size
        del spec["storageClassName"]
        if target.storage_class:
            spec["storageClassName"] = target.storage_class
        objects.append(into(claim, target.namespace))
    return objects


def limits(target: Installation) -> Object:
    """Return a LimitRange: a namespace with a quota refuses containers without limits."""
    (limit_range,) = read(DEPLOY / "quota" / "limitrange.yaml")
    return into(limit_range, target.namespace)


def owner(target: Installation, how: str) -> Object:
    """Return the job of OWNERS that makes the volumes of the PVCs writable for the images' user."""
    (job,) = read(DEPLOY / "storage" / OWNERS[how])
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    sources = {volume["name"]: volume["persistentVolumeClaim"] for volume in pod["volumes"]}
    names = [name for name, source in sources.items() if source["claimName"] in target.claims]
    for name in names:
        sources[name]["claimName"] = target.claims[sources[name]["claimName"]]
    pod["volumes"] = [volume for volume in pod["volumes"] if volume["name"] in names]
    mounts = container["volumeMounts"]
    container["volumeMounts"] = [mount for mount in mounts if mount["name"] in names]
    container["image"] = target.image or container["image"]
    return into(job, target.namespace)


def index(target: Installation) -> Object:
    """Return the job that tries whether pods of public images reach the package index."""
    (job,) = read(DEPLOY / "source" / "index.yaml")
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    container["image"] = target.image
    for variable in container["env"]:
        variable["valueFrom"]["configMapKeyRef"]["name"] = map_name()
    return into(job, target.namespace)


def every_object(target: Installation) -> Iterator[Object]:
    """Yield what an installation may have made, a binding before its role, without the source."""
    yield from reversed(manifests(target))
    yield limits(target)
    yield index(target)
    for how in OWNERS:
        yield owner(target, how)


def into(document: Object, namespace: str) -> Object:
    """Return a document of deploy/ for a namespace; cluster-wide bindings get its name."""
    metadata = document["metadata"]
    metadata["labels"] = {**metadata.get("labels", {}), **PART_OF}
    for subject in document.get("subjects", ()):
        subject["namespace"] = namespace
    if document["kind"] not in CLUSTER_KINDS:
        metadata["namespace"] = namespace
    elif document["kind"].endswith("Binding"):
        metadata["name"] = f"{metadata['name'].partition('.')[0]}.{namespace}"
    return document


def read(file: Path) -> Iterator[Object]:
    """Yield the documents of a YAML file."""
    import yaml

    yield from yaml.safe_load_all(file.read_text())
