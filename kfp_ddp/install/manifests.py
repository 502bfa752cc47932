"""The files of deploy/, set for one namespace: claims, rights, the budget, the owner of volumes."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kfp_ddp.checks.doctor.finding import Asked
from kfp_ddp.k8s.api import Object

DEPLOY = Path(__file__).parents[1] / "deploy"
OF_CLUSTER = ("ClusterRole", "ClusterRoleBinding")
PART_OF = {"app.kubernetes.io/part-of": "kfp-ddp"}
OWNERS = {"root": "chown.yaml", "group": "fsgroup.yaml"}
"""The job that gives fresh volumes to the images' user: as root, or by the group of its pod."""

Owner = Literal["root", "group"]


@dataclass(frozen=True)
class Wanted:
    """What a namespace is to have."""

    namespace: str
    storage_class: str = ""
    """Empty for the cluster's default."""
    access_mode: str = "ReadWriteMany"
    size: str = "1Ti"
    data_claim: str = Asked.data_claim
    """Empty for none, as `work_claim`."""
    work_claim: str = Asked.work_claim
    see_nodes: bool = True
    copies: bool = False
    """Whether datasets are copied to claims of their own: publish=clone, snapshot, populator."""
    image: str = ""
    """Of the job that gives volumes to their user; empty for the one in its file."""

    @property
    def claims(self) -> dict[str, str]:
        """Name of each claim by the one that it has in the files."""
        names = {Asked.data_claim: self.data_claim, Asked.work_claim: self.work_claim}
        return {file: name for file, name in names.items() if name}


def manifests(wanted: Wanted) -> list[Object]:
    """All but the job for volumes and the limits for a quota, a role before its binding."""
    folders = ["rbac", "eviction"]
    folders += ["rbac/nodes"] if wanted.see_nodes else []
    folders += ["storage"] if wanted.copies else []
    files = [DEPLOY / folder / name for folder in folders for name in _resources(DEPLOY / folder)]
    found = [into(each, wanted.namespace) for file in files for each in read(file)]
    found.sort(key=lambda each: each["kind"].endswith("Binding"))
    return [*claims(wanted), *found]


def claims(wanted: Wanted) -> list[Object]:
    """The claims, of the class, size and mode that are wanted."""
    found = []
    for claim in read(DEPLOY / "storage" / "claims.yaml"):
        file, spec = claim["metadata"]["name"], claim["spec"]
        if file not in wanted.claims:
            continue
        claim["metadata"]["name"] = wanted.claims[file]
        spec["accessModes"] = [wanted.access_mode]
        spec["resources"]["requests"]["storage"] = wanted.size
        del spec["storageClassName"]
        if wanted.storage_class:
            spec["storageClassName"] = wanted.storage_class
        found.append(into(claim, wanted.namespace))
    return found


def limits(wanted: Wanted) -> Object:
    """What a namespace with a quota needs for the containers that say nothing."""
    (found,) = read(DEPLOY / "quota" / "limitrange.yaml")
    return into(found, wanted.namespace)


def owner(wanted: Wanted, how: Owner) -> Object:
    """The job that gives the volumes of the wanted claims to the images' user."""
    (job,) = read(DEPLOY / "storage" / OWNERS[how])
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    volumes = []
    for volume in pod["volumes"]:
        claim = volume["persistentVolumeClaim"]
        if claim["claimName"] in wanted.claims:
            claim["claimName"] = wanted.claims[claim["claimName"]]
            volumes.append(volume)
    pod["volumes"] = volumes
    names = [each["name"] for each in volumes]
    container["volumeMounts"] = [m for m in container["volumeMounts"] if m["name"] in names]
    container["image"] = wanted.image or container["image"]
    return into(job, wanted.namespace)


def into(document: Object, namespace: str) -> Object:
    """A document of deploy/ as it is for this namespace, which a binding of the cluster names."""
    metadata = document["metadata"]
    metadata["labels"] = {**metadata.get("labels", {}), **PART_OF}
    for subject in document.get("subjects", ()):
        subject["namespace"] = namespace
    if document["kind"] not in OF_CLUSTER:
        metadata["namespace"] = namespace
    elif document["kind"].endswith("Binding"):
        metadata["name"] = f"{metadata['name'].partition('.')[0]}.{namespace}"
    return document


def read(file: Path) -> Iterator[Object]:
    """The documents of a file."""
    import yaml

    yield from yaml.safe_load_all(file.read_text())


def _resources(folder: Path) -> list[str]:
    (found,) = read(folder / "kustomization.yaml")
    return list(found["resources"])
