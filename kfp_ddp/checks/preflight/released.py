"""Signature and registry of a release, looked at before anything is trained."""

from collections.abc import Mapping
from typing import Any

from kfp_ddp.core.errors import InputError
from kfp_ddp.models.registry import registry_of
from kfp_ddp.models.release import Registering, Signing, part_of
from kfp_ddp.models.signature import key_of


def check_release(release: Mapping[str, Any], destination: str) -> None:
    """Refuse a release that cannot be signed, or of which the registry cannot be told.

    Args:
        release: Its settings by name.
        destination: Where bundles are uploaded to.

    Raises:
        InputError: a key or token that is not there or cannot be used, or no destination.
        StorageError: the registry does not answer.
    """
    key_of(part_of(release, Signing))
    registry = registry_of(part_of(release, Registering))
    if registry is None:
        return
    if not destination:
        raise InputError(
            f"release names the registry {registry.address}, and no destination: it is told where "
            "a bundle lies, so give destination too"
        )
    registry.check()
