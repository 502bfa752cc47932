"""What a blessed model is published as, and where: settings that the steps after the gate share."""

from collections.abc import Mapping
from typing import Any, TypeVar

from kfp_ddp.base.settings import Settings, split


class Variants(Settings):
    """Further forms of the model in its bundle."""


class Signing(Settings):
    """With what the manifest of a bundle is signed."""


class Registering(Settings):
    """The registry of models that is told of a bundle."""


class Deployment(Settings):
    """The service that answers with the model."""


M = TypeVar("M", bound=Settings)
MODELS: tuple[type[Settings], ...] = (Variants, Signing, Registering, Deployment)


def part_of(release: Mapping[str, Any], model: type[M]) -> M:
    """One of the parts of a release.

    Args:
        release: Settings of all parts by name.
        model: Of the part.

    Raises:
        InputError: a name that no part has, or a value of this one that cannot be used.
    """
    parts = dict(zip(MODELS, split("release", release, *MODELS, own={}), strict=True))
    return model.create(**parts[model])
