"""The register step: register published bundles in a registry of models."""

from collections.abc import Mapping
from typing import Any

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.log import log
from kfp_ddp.core.step import step
from kfp_ddp.models.champion import read_pointer
from kfp_ddp.models.registry.client import kubeflow_registry
from kfp_ddp.models.registry.mlflow import mlflow_registry
from kfp_ddp.models.registry.record import Registry
from kfp_ddp.models.release import MLFLOW, Registering, check_model_name, part_of
from kfp_ddp.storage.kinds import open_store
from kfp_ddp.storage.store import Store

__all__ = ["Registry", "registry_of", "run"]


def registry_of(settings: Registering, where: Store | None) -> Registry | None:
    """Return the registry of the settings for bundles at `where`, None for none; InputError."""
    if not settings.registry:
        return None
    if settings.registry == MLFLOW:
        return mlflow_registry(settings, where)
    return kubeflow_registry(settings)


@step
def run(*, destination: str, model_name: str, release: Mapping[str, Any], version: str) -> str:
    """Register the bundle, and set the stage of all versions from CHAMPION."""
    check_model_name(model_name)
    where = open_store(destination)
    registry = registry_of(part_of(release, Registering), where)
    if registry is None:
        raise InputError(
            'release names no registry: give {"registry": "http://model-registry-service…:8080"}, '
            'or {"registry": "mlflow"}'
        )
    version = version or read_pointer(where, model_name)
    if not version:
        raise InputError(
            f"{where.uri}/{model_name} has no champion: publish a model first, or give version"
        )
    registry.register(where, model_name, version)
    registry.agree(where, model_name)
    log.info(f"registered {model_name} {version} at {registry.address}")
    return version
