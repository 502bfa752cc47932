"""Models at a destination of exports: their versions, where each is from, and which is to beat."""

import os
from dataclasses import dataclass, field
from typing import Any

from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.core.settings import hint, mapping_in
from kfp_ddp.models import succession
from kfp_ddp.models.bundle import LARGEST_CONFIG
from kfp_ddp.models.champion import find, move, pointed_at
from kfp_ddp.models.exported import exported
from kfp_ddp.models.lineage import FILE as LINEAGE
from kfp_ddp.models.registry import Registry, agree, registry_of
from kfp_ddp.models.release import Registering
from kfp_ddp.storage.destination import Destination, Folder, open_destination

REGISTRY_TOKEN = "KFP_DDP_MODEL_REGISTRY_TOKEN"  # noqa: S105
"""The variable with a bearer token for the registry."""


@dataclass(frozen=True)
class Version:
    """A bundle that was exported; what it does not say is ''."""

    version: str
    uri: str
    champion: bool
    """Whether CHAMPION names it."""
    damaged: str = ""
    """Why nobody may believe it; '' where it is whole."""
    accuracy: float | None = None
    samples: int = 0
    architecture: str = ""
    run_id: str = ""
    exported_at: str = ""
    dataset_digest: str = ""
    compared_with: str = ""
    """The champion's version when it was judged."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of the training."""


def opened(destination: str) -> Destination:
    """The destination, which has to be there.

    Raises:
        InputError: it is not, or none is named.
    """
    if not destination:
        raise InputError(
            "there is no destination: give --destination gs://bucket/models, or set it once by "
            "KFP_DDP_DESTINATION or in kfp-ddp.yaml"
        )
    where = open_destination(destination)
    if isinstance(where, Folder) and not where.root.is_dir():
        raise InputError(f"there is no folder {where.root}: correct --destination")
    return where


def versions(where: Destination, name: str) -> list[Version]:
    """All versions of a model, the newest first.

    Raises:
        InputError: there is no such model.
    """
    now = pointed_at(where, name)
    found = [described(where, name, each, now) for each in _versions_of(where, name)]
    return sorted(found, key=lambda one: one.exported_at, reverse=True)


def described(where: Destination, name: str, version: str, now: str) -> Version:
    """What a version is, from its own files.

    Args:
        where: The destination.
        name: Of the model.
        version: To describe.
        now: What CHAMPION names.
    """
    uri, champion = f"{where.uri}/{name}/{version}", version == now
    try:
        held = find(uri)
        if held is None or held.version != version:
            return Version(version, uri, champion, damaged="its files are not those of this name")
        config = mapping_in(held.sealed.read("config.json", LARGEST_CONFIG))
        lineage = mapping_in(held.sealed.read(LINEAGE, LARGEST_CONFIG)) or config.get("lineage", {})
    except (InputError, StorageError) as error:
        if error.retryable:
            raise
        return Version(version, uri, champion, damaged=str(error))
    evaluation = held.evaluation
    return Version(
        version,
        uri,
        champion,
        accuracy=evaluation.accuracy,
        samples=evaluation.samples,
        architecture=evaluation.model,
        run_id=lineage.get("run_id", ""),
        exported_at=lineage.get("exported_at", ""),
        dataset_digest=evaluation.dataset_digest,
        compared_with=lineage.get("champion_version", ""),
        settings=config.get("training", {}),
    )


def registry_at(address: str) -> Registry | None:
    """The registry that is told of moves, '' for none; its token is in `REGISTRY_TOKEN`.

    Raises:
        InputError: it is no address, or there is no client.
    """
    token = REGISTRY_TOKEN if os.environ.get(REGISTRY_TOKEN) else ""
    return registry_of(Registering.create(registry=address, registry_token=token))


def promote(
    where: Destination,
    name: str,
    word: str,
    instead_of: str = "",
    registry: Registry | None = None,
) -> tuple[str, str]:
    """Make a version the champion, if it is whole and nobody else makes another one meanwhile.

    Args:
        where: The destination.
        name: Of the model.
        word: The version, or its first characters.
        instead_of: The version that has to be the champion now, or its first characters; '' for
            whichever is.
        registry: Is told of it; None for none.

    Returns:
        The version, and the one that it replaces: the same where it was the champion already.

    Raises:
        InputError: there is no such version, or another one is the champion.
        StorageError: the registry does not answer.
    """
    known = _versions_of(where, name)
    version, now = _one(name, word, known), pointed_at(where, name)
    if instead_of and not now.startswith(instead_of):
        raise InputError(
            f"the champion of {name} is {now or 'none'}, not {instead_of}: nothing was changed"
        )
    return _moved(where, name, version, now, "promote", registry)


def roll_back(where: Destination, name: str, registry: Registry | None = None) -> tuple[str, str]:
    """Make the champion before this one the champion again; the same two as of `promote`.

    Raises:
        InputError: there was none before, or it is gone.
    """
    known, now = _versions_of(where, name), pointed_at(where, name)
    if not now:
        raise InputError(f"{name} has no champion to go back from: kfp-ddp promote makes one")
    before = succession.replaced_by(succession.changes(where, name), now)
    if before is None and now in known:
        before = described(where, name, now, now).compared_with
    there = ", ".join(each for each in known if each != now) or "no others"
    if not before:
        raise InputError(
            f"{now} is the first champion of {name} that is known: promote one of its versions "
            f"({there})"
        )
    if before not in known:
        raise InputError(
            f"{before}, the champion of {name} before {now}, is not at {where.uri} any more: "
            f"promote another version ({there})"
        )
    return _moved(where, name, before, now, succession.BACK, registry)


def _moved(
    where: Destination, name: str, version: str, now: str, by: str, registry: Registry | None
) -> tuple[str, str]:
    if version != now:
        whole = described(where, name, version, now)
        if whole.damaged:
            raise InputError(f"{name} {version} cannot be the champion: {whole.damaged}")
        if registry is not None:
            registry.check()
        found = move(where, name, version, now, by)
        if found != version:
            raise StorageError(
                f"CHAMPION of {name} was moved to {found or 'none'} meanwhile, and stays: look at "
                f"kfp-ddp models {name}, then try again"
            )
    if registry is not None:
        agree(registry, where, name)
    return version, now


def _versions_of(where: Destination, name: str) -> list[str]:
    known = exported(where)
    if name not in known:
        near = hint(name, list(known)) or f"; there are {', '.join(known) or 'none'}"
        raise InputError(f"there is no model {name!r} at {where.uri}{near}")
    return known[name]


def _one(name: str, word: str, known: list[str]) -> str:
    found = [each for each in known if word and each.startswith(word)]
    if len(found) != 1:
        many = f"{len(found)} versions" if found else "no version"
        raise InputError(f"{word!r} is {many} of {name}: there are {', '.join(known)}")
    return found[0]
