"""The step `dataset_volume`: a version of a dataset, ready to be mounted by many."""

from pathlib import Path
from typing import Any, NamedTuple, Protocol

from kfp_ddp.components.data_sync.engine import check_dataset
from kfp_ddp.components.data_sync.versions import success
from kfp_ddp.components.dataset_volume import cluster
from kfp_ddp.components.step import step
from kfp_ddp.training.errors import InputError

STRATEGIES = ("in-place",)
LABELS = "kfp-ddp.dev"


class Artifact(Protocol):
    """What is used of a KFP output artifact."""

    path: str


class Volume(NamedTuple):
    """Claim to mount, and where the version lies in it."""

    claim: str
    path: str


@step
def run(report: Artifact, dataset: str, digest: str, path: str, claim: str, publish: str) -> Volume:
    """Publish the version and write the report."""
    check_dataset(dataset)
    if publish not in STRATEGIES:
        raise InputError(f"publish is {publish!r}; give one of {', '.join(STRATEGIES)}")
    api = cluster.connect()
    notes = _local(digest, path) if api is None else _in_place(api, dataset, digest, claim)
    rows = [("Claim", claim), ("Path", path), ("Digest", digest), ("Strategy", publish)]
    lines = ["# Dataset volume", "", "| | |", "|---|---|"]
    lines += [f"| {name} | `{value}` |" for name, value in rows]
    lines += ["", *(f"- {note}" for note in notes)]
    Path(report.path).write_text("\n".join(lines) + "\n")
    print("\n".join(notes), flush=True)
    return Volume(claim, path)


def _local(digest: str, path: str) -> list[str]:
    found = success(Path(path))
    if found != digest:
        state = f"holds {found[:12]}" if found else "is not complete"
        raise InputError(f"version {path} {state}, expected {digest[:12]}; run data_sync again")
    return ["Outside a cluster: the folder is complete and is used as it is."]


def _in_place(api: Any, dataset: str, digest: str, claim: str) -> list[str]:
    from kubernetes import client
    from kubernetes.client.exceptions import ApiException

    space = cluster.namespace()
    core = client.CoreV1Api(api)
    try:
        found = core.read_namespaced_persistent_volume_claim(claim, space)
        core.patch_namespaced_persistent_volume_claim(
            claim,
            space,
            {
                "metadata": {
                    "labels": {f"{LABELS}/dataset": dataset, f"{LABELS}/digest": digest[:12]},
                    "annotations": {f"{LABELS}/digest": digest},
                }
            },
        )
    except ApiException as error:
        if error.status == 404:
            raise InputError(f"claim {claim} is not in namespace {space}; create it") from error
        raise InputError(
            f"claim {claim} in namespace {space}: {error.reason}; the service account needs get "
            "and patch on persistentvolumeclaims"
        ) from error
    modes = found.spec.access_modes
    notes = [f"Readers mount claim {claim} ({', '.join(modes)}) read-only."]
    if not {"ReadWriteMany", "ReadOnlyMany"} & set(modes):
        notes.append("Its access mode lets pods of one node mount it at a time.")
    return notes
