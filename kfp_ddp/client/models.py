"""Exported models at a destination: their versions, lineage and champions."""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from kfp_ddp.client.kfp.login import check_private
from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.core.folders import with_home
from kfp_ddp.core.settings import hint, mapping_in
from kfp_ddp.datasets.volume.cluster import CLAIMS
from kfp_ddp.datasets.volume.publish import collect
from kfp_ddp.datasets.volume.request import DOMAIN, MANAGED, VolumeRequest
from kfp_ddp.jobs.live_runs import live_runs
from kfp_ddp.k8s.api import Api
from kfp_ddp.k8s.objects import label
from kfp_ddp.models import champion as champions
from kfp_ddp.models.bundle import CONFIG, DELETING, LARGEST_CONFIG, LINEAGE
from kfp_ddp.models.champion import find, list_versions, move, open_bundle, read_pointer
from kfp_ddp.models.registry import Registry, registry_of
from kfp_ddp.models.release import Registering
from kfp_ddp.rollout.rollout import versions_in_service
from kfp_ddp.storage.folder import Folder
from kfp_ddp.storage.kinds import open_store
from kfp_ddp.storage.store import Store

REGISTRY_TOKEN = "KFP_DDP_MODEL_REGISTRY_TOKEN"  # noqa: S105
"""Environment variable with a bearer token for the registry."""


@dataclass(frozen=True)
class ModelVersion:
    """An exported bundle; unknown values are ''."""

    version: str
    uri: str
    champion: bool
    """True if CHAMPION names it."""
    damaged: str = ""
    """Why it is invalid; '' if it is complete."""
    accuracy: float | None = None
    samples: int = 0
    architecture: str = ""
    run_id: str = ""
    exported_at: str = ""
    dataset_digest: str = ""
    compared_with: str = ""
    """The champion's version at the time of its gate."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the training."""


def open_models(destination: str) -> Store:
    """Return the destination; raise InputError if it does not exist, or is not set."""
    if not destination:
        raise InputError(
            "no destination is set: give --destination gs://bucket/models, or set it by "
            "KFP_DDP_DESTINATION or in ~/.config/kfp-ddp/config.yaml"
        )
    where = open_store(with_home(destination))
    if isinstance(where, Folder) and not where.root.is_dir():
        raise InputError(f"folder {where.root} not found: correct --destination")
    return where


def describe(where: Store, name: str, version: str, champion_version: str) -> ModelVersion:
    """Read what a version is from its files."""
    row = ModelVersion(version, f"{where.uri}/{name}/{version}", version == champion_version)
    try:
        model = find(row.uri)
        if model is None or model.version != version:
            return replace(row, damaged="its files belong to another version")
        config = mapping_in(model.bundle.read(CONFIG, LARGEST_CONFIG))
        lineage = model.bundle.lineage()
    except (InputError, StorageError) as error:
        if error.retryable:
            raise
        return replace(row, damaged=str(error))
    evaluation = model.evaluation
    return replace(
        row,
        accuracy=evaluation.accuracy,
        samples=evaluation.samples,
        architecture=evaluation.model,
        run_id=lineage.get("run_id", ""),
        exported_at=lineage.get("exported_at", ""),
        dataset_digest=evaluation.dataset_digest,
        compared_with=lineage.get("champion_version", ""),
        settings=config.get("training", {}),
    )


def registry_at(address: str, where: Store) -> Registry | None:
    """Return the registry to update, None for ''; its token is in `REGISTRY_TOKEN`."""
    token = REGISTRY_TOKEN if address.startswith("http") and os.environ.get(REGISTRY_TOKEN) else ""
    settings = Registering.create(registry=address, registry_token=token)
    if token:
        check_private(address)
    return registry_of(settings, where)


@dataclass(frozen=True)
class Model:
    """A model at a destination, and the address of the registry to update."""

    where: Store
    name: str
    registry: str = ""

    def versions(self) -> list[ModelVersion]:
        """Return its versions, the newest first; raise InputError if there are none."""
        champion = read_pointer(self.where, self.name)
        rows = [describe(self.where, self.name, version, champion) for version in self._known()]
        return sorted(rows, key=lambda row: row.exported_at, reverse=True)

    def promote(self, version: str, instead_of: str = "") -> tuple[str, str]:
        """Make a version the champion, if it is complete and no other becomes it meanwhile.

        `version` may be the start of one; so may `instead_of`, the present champion, '' for any.
        Return the version and the replaced one, which are the same if it was already the champion.
        InputError: there is no such version, or another champion. StorageError: no answer.
        """
        known = self._known()
        matches = [name for name in known if name.startswith(version)] if version else []
        if len(matches) != 1:
            many = f"{len(matches)} versions" if matches else "no version"
            names = ", ".join(known)
            raise InputError(f"{version!r} matches {many} of {self.name}: there are {names}")
        now = read_pointer(self.where, self.name)
        if instead_of and not now.startswith(instead_of):
            raise InputError(
                f"the champion of {self.name} is {now or 'none'}, not {instead_of}: nothing was "
                "changed"
            )
        return self._set_champion(matches[0], now, "promote")

    def rollback(self) -> tuple[str, str]:
        """Make the previous champion the champion again; return and raise as `promote`."""
        where = self.where
        name = self.name
        known = self._known()
        now = read_pointer(where, name)
        if not now:
            raise InputError(f"{name} has no champion to roll back: kfp-ddp promote sets one")
        before = champions.replaced_by(champions.history(where, name), now)
        # Without an entry of the history, the run that made it the champion knows the one before.
        if before is None and now in known:
            before = describe(where, name, now, now).compared_with
        names = [version for version in known if version != now]
        others = ", ".join(names) or "no others"
        if not before:
            raise InputError(
                f"{now} is the first known champion of {name}: promote one of its versions "
                f"({others})"
            )
        if before not in known:
            raise InputError(
                f"{before}, the champion of {name} before {now}, was deleted from {where.uri}: "
                f"promote another version ({others})"
            )
        return self._set_champion(before, now, champions.ROLLBACK)

    def _set_champion(self, version: str, now: str, by: str) -> tuple[str, str]:
        where = self.where
        name = self.name
        registry = registry_at(self.registry, where)
        if version != now:
            described = describe(where, name, version, now)
            if described.damaged:
                raise InputError(f"{name} {version} cannot be the champion: {described.damaged}")
            open_bundle(described.uri, "publish it again").verify()
            if registry is not None:
                registry.check()
            current = move(where, name, version, now, by)
            if current != version:
                raise StorageError(
                    f"CHAMPION of {name} was set to {current or 'none'} meanwhile and was not "
                    f"changed: see kfp-ddp models {name}, then try again"
                )
        if registry is not None:
            registry.agree(where, name)
        return version, now

    def _known(self) -> list[str]:
        known = list_versions(self.where)
        if self.name not in known:
            names = ", ".join(known) or "none"
            near = hint(self.name, list(known)) or f"; there are {names}"
            raise InputError(f"there is no model {self.name!r} at {self.where.uri}{near}")
        return known[self.name]


LASTING = timedelta(days=1)  # of an upload
LEFT = re.compile(rf"[^/]+/[0-9a-f]{{12}}/({re.escape(LINEAGE)}|{DELETING})")


def copies(api: Api, keep: int, *, dry_run: bool) -> Iterator[str]:
    """Delete unused copies of each dataset but the `keep` newest, and yield their names."""
    selector = ",".join(f"{key}={value}" for key, value in MANAGED.items())
    claims = api.list_objects(CLAIMS, {"labelSelector": selector}, retry=True)
    datasets = {label(claim, f"{DOMAIN}/dataset") for claim in claims}
    for dataset in sorted(datasets - {""}):
        fields: dict[str, Any] = {"dataset": dataset, "keep_claims": keep}
        yield from collect(api, VolumeRequest.model_construct(**fields), "", dry_run)


def bundles(api: Api | None, where: Store, keep: int, *, dry_run: bool) -> Iterator[str]:
    """Delete old versions that runs have published, and their unfinished uploads; yield the names.

    The `keep` newest of each model remain, its champion, the version that this replaced, those in
    service, and all while there is no champion. Interrupted deletions are completed. Without a
    cluster, nothing is in service and no run is live.
    """
    known = champions.list_versions(where)
    serving = versions_in_service(api) if api else set()
    alive = live_runs(api)
    for model in known:
        folder = open_store(f"{where.uri}/{model}")
        for version in _unused(where, model, keep, serving):
            if dry_run or champions.delete(folder, version):
                yield f"{model}/{version}"
    for model, version in _left_uploads(where, known, alive):
        folder = open_store(f"{where.uri}/{model}")
        if dry_run or champions.delete(folder, version):
            yield f"{model}/{version}"


def _unused(where: Store, model: str, keep: int, serving: set[str]) -> Iterator[str]:
    """Yield the old versions of a model that nothing needs; none while it has no champion."""
    champion = read_pointer(where, model)
    if not champion:
        return
    replaced = champions.replaced_by(champions.history(where, model), champion)
    used = {champion, replaced, *serving}
    valid = [row for row in Model(where, model).versions() if not row.damaged]
    published = [row.version for row in valid if row.run_id]
    for version in published[keep:]:
        if version not in used:
            yield version


def _left_uploads(
    where: Store, known: Mapping[str, Sequence[str]], alive: Callable[[str], bool]
) -> Iterator[tuple[str, str]]:
    """Yield models and versions whose upload or deletion was interrupted."""
    latest = (datetime.now(UTC) - LASTING).isoformat()
    paths = sorted(name for name, _ in where.list("") if LEFT.fullmatch(name))
    for path in paths:
        model, version, file = path.split("/")
        if file == DELETING:
            yield model, version
            continue
        lineage = mapping_in(where.read(path, LARGEST_CONFIG))
        run = str(lineage.get("run_id") or "")
        exported = str(lineage.get("exported_at") or "")
        # A run that goes on may still complete it; both times are in ISO 8601.
        given_up = "2020" < exported < latest and not alive(run)
        complete = version in known.get(model, ())
        if run and given_up and not complete:
            yield model, version
