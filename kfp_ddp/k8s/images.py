"""The images of a run by digest, since a tag may move."""

import contextlib
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
    step: list[Object] = []
    with contextlib.suppress(InputError):
        if os.environ.get("KFP_POD_NAME") and (pod := own_pod(Api.connect())):
            step = [pod]
    return {
        "version": __version__,
        "step": used(step, STEP),
        "workers": used(workers, containers),
    }


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
