"""The register step: register published bundles in Kubeflow Model Registry."""

from collections.abc import Mapping
from typing import Any

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.log import log
from kfp_ddp.core.step import step
from kfp_ddp.models.champion import read_pointer
from kfp_ddp.models.registry.client import Registry, registry_of
from kfp_ddp.models.release import Registering, check_model_name, part_of
from kfp_ddp.storage.kinds import open_store

__all__ = ["Registry", "registry_of", "run"]


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
    registry.register(where, model_name, version)
    registry.agree(where, model_name)
    log.info(f"registered {model_name} {version} at {registry.address}")
    return version
