"""Where the images of steps and workers are pulled from: set once, for every pipeline."""

import re
from typing import NamedTuple

from kfp_ddp.core.errors import InputError

REGISTRY = "ghcr.io/kfp-ddp"
# Host, port and folders, as images are named; a scheme would have an empty folder.
_FOLDERS = r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?(:[0-9]+)?(/[a-z0-9]+([._-]+[a-z0-9]+)*)*"
_TAG = r"(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(@sha256:[0-9a-f]{64})?"


class Images(NamedTuple):
    """What components' own images are replaced by."""

    registry: str = REGISTRY
    """Where launcher and trainer are pulled from, by the tag that components name."""
    launcher: str = ""
    """Another image in place of the launcher; empty for that of the registry."""
    trainer: str = ""
    """The same of the trainer, such as one of yours that is built from it."""

    def check(self) -> None:
        """Refuse what no image is named by.

        Raises:
            InputError: naming what was given.
        """
        if not re.fullmatch(f"{_FOLDERS}/?", self.registry):
            raise InputError(
                f"registry {self.registry!r} is not a registry: give host/path in small letters, "
                "no scheme"
            )
        for name in ("launcher", "trainer"):
            image = getattr(self, name)
            if image and not re.fullmatch(_FOLDERS + _TAG, image):
                raise InputError(
                    f"{name} image {image!r} is not an image: give host/path:tag or @sha256:…, the "
                    "path in small letters, no scheme"
                )

    def put_into(self, document: str) -> str:
        """A compiled pipeline with these images."""
        for name in ("launcher", "trainer"):
            if image := getattr(self, name):
                document = re.sub(rf"{re.escape(REGISTRY)}/{name}:[\w.-]+", image, document)
        return document.replace(f"{REGISTRY}/", f"{self.registry.rstrip('/')}/")
