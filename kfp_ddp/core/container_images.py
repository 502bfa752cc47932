"""The images of steps and workers: of a registry, or public ones without our package."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kfp_ddp import __version__
from kfp_ddp.core.errors import InputError

SETTINGS = ("images", "registry", "launcher_image", "trainer_image")
REGISTRY = "ghcr.io/kfp-ddp"
"""Registry in the components' sources."""
PUBLIC = {
    "launcher": "docker.io/library/python:3.11.16-slim-bookworm@sha256:"
    "c425d915a89a6dcd3183b1797ad9bd8878caff5a417f6371c8df93c8ea8b727f",
    # With the torch of images/trainer/requirements.lock.
    "trainer": "docker.io/pytorch/pytorch:2.15.0-cuda13.2-cudnn9-runtime",
}
KINDS = (*PUBLIC,)
# Host, port and path of an image; a URL scheme does not match.
_FOLDERS = r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?(:[0-9]+)?(/[a-z0-9]+([._-]+[a-z0-9]+)*)*"
_TAG = r"(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(@sha256:[0-9a-f]{64})?"


def check_image(called: str, image: str) -> None:
    """Raise InputError, with the name `called`, for a text that is no image; '' is none."""
    if image and not re.fullmatch(_FOLDERS + _TAG, image):
        raise InputError(
            f"{called} {image!r} is not an image: give host/path:tag or @sha256:…, the path in "
            "lower case, without a scheme"
        )


class Images(NamedTuple):
    """Image of each kind, and whether pods take our package from a ConfigMap."""

    launcher: str = PUBLIC["launcher"]
    trainer: str = PUBLIC["trainer"]
    public: bool = True

    @classmethod
    def create(cls, settings: Mapping[str, Any]) -> "Images":
        """Return the images of `SETTINGS`, '' for a missing one; InputError for an invalid one."""
        images, registry, *own = (str(settings.get(name, "")) for name in SETTINGS)
        if images not in ("", "public", "registry"):
            raise InputError(f"images={images!r} is neither public nor registry")
        if images == "registry" and not registry:
            raise InputError("images=registry without a registry: give --registry host/path")
        if registry and not re.fullmatch(f"{_FOLDERS}/?", registry):
            raise InputError(
                f"registry {registry!r} is not a registry: give host/path in lower case, "
                "without a scheme"
            )
        # A registry is where the own images are, unless the public ones are asked for.
        public = images == "public" or not registry
        chosen: list[str] = []
        for kind, image in zip(KINDS, own, strict=True):
            check_image(f"{kind} image", image)
            default = PUBLIC[kind] if public else f"{registry.rstrip('/')}/{kind}:{__version__}"
            chosen.append(image or default)
        return cls(chosen[0], chosen[1], public)

    def listed(self) -> dict[str, str]:
        """Return the image of each kind."""
        return {"launcher": self.launcher, "trainer": self.trainer}

    def put_into(self, document: str) -> str:
        """Return a compiled pipeline of ours with these images."""
        for kind in KINDS:
            theirs = rf"{re.escape(REGISTRY)}/{kind}:[\w.-]+|{re.escape(PUBLIC[kind])}(?![\w.-])"
            document = re.sub(theirs, getattr(self, kind), document)
        return document


def lock_of(image: str, package: Path = Path(__file__).parents[1]) -> Path:
    """Return the lock of an image, or of what a pod installs first."""
    return package / "images" / image / "requirements.lock"
