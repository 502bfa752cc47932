"""The registry of models, told of what lies at a destination of exports."""

from kfp_ddp.models.champion import pointed_at
from kfp_ddp.models.exported import exported
from kfp_ddp.models.registry.client import Registry, registry_of
from kfp_ddp.models.registry.record import record_of
from kfp_ddp.storage.destination import Destination

__all__ = ["Registry", "agree", "register", "registry_of"]


def register(registry: Registry, where: Destination, name: str, version: str) -> str:
    """Have a bundle in the registry, a candidate until it is the champion; returns its id there.

    Args:
        registry: The server.
        where: The destination.
        name: Of the model.
        version: Of the bundle, which has to be whole.

    Raises:
        InputError: there is no such bundle, or the registry refuses us.
        StorageError: the registry does not answer.
    """
    return registry.register(record_of(where, name, version))


def agree(registry: Registry, where: Destination, name: str) -> None:
    """Let the registry say who is the champion, who was, and which versions are gone.

    What CHAMPION names counts, whoever moved it; it is registered if it is not yet.

    Args:
        registry: The server.
        where: The destination.
        name: Of the model.

    Raises:
        InputError: the champion is damaged, or the registry refuses us.
        StorageError: the registry does not answer.
    """
    place, champion = f"{where.uri}/{name}", pointed_at(where, name)
    there = set(exported(where, name).get(name, []))
    if not registry.agree(name, place, champion, there):
        register(registry, where, name, champion)
        registry.agree(name, place, champion, there)
