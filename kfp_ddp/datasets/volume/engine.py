"""The step `dataset_volume`: a version of a dataset, ready to be mounted by many."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kfp_ddp.core.errors import StorageError
from kfp_ddp.core.log import log
from kfp_ddp.core.settings import split
from kfp_ddp.core.step import Artifact, step, write_artifact
from kfp_ddp.datasets.access import EachNode, options_on_nodes
from kfp_ddp.datasets.versions import success
from kfp_ddp.datasets.volume.cluster import CLAIMS, connect
from kfp_ddp.datasets.volume.publish import collect, publish
from kfp_ddp.datasets.volume.request import Published, VolumeOptions, VolumeRequest
from kfp_ddp.k8s.api import Api, ApiError, Refused


class Volume(NamedTuple):
    """Claim to mount, and where the version lies in it."""

    claim: str
    path: str


@step
def run(*, volume_report: Artifact, options: Mapping[str, Any], **inputs: Any) -> Volume:
    """Publish the version as `VolumeOptions` has it, collect old claims, and write the report."""
    (settings,) = split("options", options, VolumeOptions)
    request = VolumeRequest.create(**inputs, **settings)
    if request.publish == "none":
        done = Published(request.claim, request.path, "none", ["nothing was published"])
    elif request.publish == "each-node":
        done = publish_per_node(request)
    elif (api := connect()) is None or _notebook(api, request):
        done = local(request)
    else:
        done = publish(api, request)
        try:
            gone = collect(api, request, done.claim)
        except (ApiError, StorageError) as error:
            done.notes.append(f"old claims were not looked for ({error})")
        else:
            done.notes += [f"deleted {name}, old and not in use" for name in gone]
    rows = [
        ("Claim", done.claim),
        ("Path", done.path),
        ("Dataset", request.dataset),
        ("Digest", request.digest),
        ("Strategy", done.strategy),
    ]
    lines = ["# Dataset volume", "", "| | |", "|---|---|"]
    lines += [f"| {name} | `{value}` |" for name, value in rows]
    lines += ["", *(f"- {note}" for note in done.notes)]
    write_artifact(volume_report, "\n".join(lines) + "\n")
    log.info("\n".join(done.notes))
    return Volume(done.claim, done.path)


def _notebook(api: Api, request: VolumeRequest) -> bool:
    """Return whether this pod has the version in a folder of its own, without a PVC."""
    if success(Path(request.path)) != request.digest:
        return False
    try:
        return api.get(CLAIMS, request.claim, retry=True) is None
    except Refused:
        return True


def publish_per_node(request: VolumeRequest) -> Published:
    """Return an address with which each reader syncs the version to a folder of its own."""
    options = options_on_nodes(request.sync)
    dataset = EachNode(request.source, request.dataset, request.digest, options)
    note = f"each pod that reads it downloads version {request.digest[:12]} of {request.source}"
    return Published(request.claim, dataset.address(), "each-node", [note])


def local(request: VolumeRequest) -> Published:
    """Return the folder itself, without a PVC; raise StorageError if it is not the version."""
    digest = success(Path(request.path))
    if digest != request.digest:
        state = f"holds {digest[:12]}" if digest else "is not complete"
        raise StorageError(
            f"version {request.path} {state}, expected {request.digest[:12]}; run data_sync again"
        )
    note = f"no claim {request.claim} here: the folder is complete and is used as it is"
    return Published(request.claim, request.path, "in-place", [note])
