"""The register step: register published bundles in Kubeflow Model Registry."""

from collections.abc import Mapping
from typing import Any

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.step import step
from kfp_ddp.models.bundle import check_model_name
from kfp_ddp.models.champion import list_versions, read_pointer
from kfp_ddp.models.registry.client import Registry, registry_of
from kfp_ddp.models.registry.record import record_of
from kfp_ddp.models.release import Registering, part_of
from kfp_ddp.storage.kinds import open_store
from kfp_ddp.storage.store import Store

__all__ = ["Registry", "agree", "register", "registry_of", "run"]


@step
def run(*, destination: str, model_name: str, release: Mapping[str, Any], version: str) -> str:
    """Register the bundle, and set the stage of all versions from CHAMPION."""
    check_model_name(model_name)
    registry = registry_of(part_of(release, Registering))
    if registry is None:
        raise InputError(
            'release names no registry: give {"registry": "http://model-registry-service…:8080"}'
        )
    where = open_store(destination)
    version = version or read_pointer(where, model_name)
    if not version:
        raise InputError(
            f"{where.uri}/{model_name} has no champion: publish a model first, or give version"
        )
    register(registry, where, model_name, version)
    agree(registry, where, model_name)
    print(f"registered {model_name} {version} at {registry.address}")
    return version


def register(registry: Registry, where: Store, name: str, version: str) -> str:
    """Register a bundle, as a candidate until it is the champion; return its id in the registry.

    Args:
        registry: The server.
        where: The destination.
        name: Of the model.
        version: Of the bundle, which must be complete.

    Raises:
        InputError: the bundle does not exist, or the registry denies access.
        StorageError: the registry does not respond.
    """
    return registry.register(record_of(where, name, version))


def agree(registry: Registry, where: Store, name: str) -> None:
    """Set the stages in the registry: the champion, former ones, and deleted versions.

    CHAMPION decides; the version that it names is registered if it is missing.

    Args:
        registry: The server.
        where: The destination.
        name: Of the model.

    Raises:
        InputError: the champion is damaged, or the registry denies access.
        StorageError: the registry does not respond.
    """
    uri, champion = f"{where.uri}/{name}", read_pointer(where, name)
    existing = set(list_versions(where, name).get(name, []))
    if not registry.agree(name, uri, champion, existing):
        register(registry, where, name, champion)
        registry.agree(name, uri, champion, existing)
