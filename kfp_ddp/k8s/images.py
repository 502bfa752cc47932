"""The images of a run by digest, since a tag may move."""

import os
from collections.abc import Collection, Iterable

from kfp_ddp import __version__
from kfp_ddp.core.errors import InputError
from kfp_ddp.k8s.api import Api, Object, own_pod
from kfp_ddp.k8s.objects import containers

STEP = ("main",)
"""The container of a step's pod that runs its program."""


def record(workers: Iterable[Object] = (), containers: Collection[str] = ()) -> Object:
    """Return our version, and the images of the step and of its workers."""
    return {
        "version": __version__,
        "step": used(_own_pod(), STEP),
        "workers": used(workers, containers),
    }


def _own_pod() -> list[Object]:
    if not os.environ.get("KFP_POD_NAME"):
        return []
    try:
        pod = own_pod(Api.connect())
    except InputError:
        return []
    return [pod] if pod else []


def used(pods: Iterable[Object], of: Collection[str]) -> list[dict[str, str]]:
    """Return name and digest of each image that these containers ran, by the pods' nodes."""
    images: dict[tuple[str, str], None] = {}
    for pod in pods:
        names = {item["name"]: item["image"] for item in pod["spec"]["containers"]}
        for status in containers(pod):
            digest = str(status.get("imageID") or "").rpartition("@")[2]
            if digest and status["name"] in of:
                images[names[status["name"]], digest] = None
    return [{"image": image, "digest": digest} for image, digest in images]
