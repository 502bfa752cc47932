"""The register step: a published bundle in, a version of a registered model out."""

from collections.abc import Mapping
from typing import Any

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.step import step
from kfp_ddp.models.bundle import check_model_name
from kfp_ddp.models.champion import pointed_at
from kfp_ddp.models.registry import agree, registry_of
from kfp_ddp.models.registry import register as registered
from kfp_ddp.models.release import Registering, part_of
from kfp_ddp.storage.destination import open_destination


@step
def run(*, destination: str, model_name: str, release: Mapping[str, Any], version: str) -> str:
    """Register the bundle, and say of all versions what CHAMPION says."""
    check_model_name(model_name)
    registry = registry_of(part_of(release, Registering))
    if registry is None:
        raise InputError(
            'release names no registry: give {"registry": "http://model-registry-service…:8080"}'
        )
    where = open_destination(destination)
    version = version or pointed_at(where, model_name)
    if not version:
        raise InputError(
            f"{where.uri}/{model_name} has no champion: publish a model first, or give version"
        )
    registered(registry, where, model_name, version)
    agree(registry, where, model_name)
    print(f"registered {model_name} {version} at {registry.address}")
    return version
