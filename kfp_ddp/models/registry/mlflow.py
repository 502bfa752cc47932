"""Client of MLflow's model registry; all calls are idempotent."""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.core.machine import require
from kfp_ddp.core.text import one_line
from kfp_ddp.models.champion import list_versions, read_pointer
from kfp_ddp.models.registry.record import (
    BUNDLE,
    CANDIDATE,
    CHAMPION,
    MLFLOW_RUN,
    STAGE,
    RegisteredVersion,
    record_of,
    stage_of,
)
from kfp_ddp.models.release import Registering
from kfp_ddp.storage.folder import Folder
from kfp_ddp.storage.store import Store
from kfp_ddp.training.report.trackers import mlflow_client

VERSION = "version"
"""Tag with the version of the bundle; MLflow numbers its own from 1."""
RETRIES = 3
"""Of a request: with the pauses of MLflow a quarter of a minute, and 10 seconds for each answer."""
LONGEST = 5000
"""Characters of a tag that all versions of MLflow accept."""
DENIALS = ("UNAUTHENTICATED", "CUSTOMER_UNAUTHORIZED", "PERMISSION_DENIED")
"""Codes of MLflow for a request without the rights to it."""
_URI = "MLFLOW_TRACKING_URI"
_ADDRESS = re.compile(r"(https?|file)://[^\s@]+")


class MlflowRegistry:
    """A server of MLflow; InputError if it denies access, StorageError if it does not respond."""

    def __init__(self, address: str, author: str) -> None:
        require("mlflow", "registry=mlflow")
        self.address = address
        self._author = author
        self._client: Any = mlflow_client(address, RETRIES)

    def check(self) -> None:
        """Raise an error if it does not respond or denies access; changes nothing."""
        with self._errors():
            self._client.search_registered_models(max_results=1)

    def register(self, where: Store, model: str, version: str) -> str:
        """Register a bundle, a candidate until `agree`; return its number in MLflow."""
        record = record_of(where, model, version)
        uri = str(record.properties[BUNDLE])
        values = {
            VERSION: version,
            "uri": record.uri,
            "format": record.format,
            "author": self._author,
            **record.properties,
        }
        tags = {name: str(value)[:LONGEST] for name, value in values.items()}
        with self._errors():
            known = self._versions(where, model).get(version)
            if known is None:
                known = self._create(record, uri, tags)
            self._set_tags(known, tags)
        return str(known.version)

    def agree(self, where: Store, model: str) -> None:
        """Set the stages of versions with bundles here by CHAMPION, registered if it is missing."""
        champion = read_pointer(where, model)
        existing = set(list_versions(where, model).get(model, []))
        with self._errors():
            versions = self._versions(where, model)
            if champion not in {"", *versions}:
                self.register(where, model, champion)
                versions = self._versions(where, model)
            # The new champion last, so that there are never two.
            for version in sorted(versions, key=lambda name: name == champion):
                known = versions[version]
                stage = stage_of(version, champion, existing, known.tags.get(STAGE, CANDIDATE))
                self._set_tags(known, {STAGE: stage})
                if stage == CHAMPION:
                    self._set_alias(known)

    def _versions(self, where: Store, model: str) -> dict[str, Any]:
        """Return MLflow's versions of bundles here, by the bundle's version."""
        # The first one counts, should two steps create one at the same time.
        order = ["version_number DESC"]
        rows = self._client.search_model_versions(f"name = '{model}'", order_by=order)
        named = [(row.tags.get(VERSION), row) for row in rows]
        start = f"{where.uri}/{model}/"
        return {name: row for name, row in named if row.tags.get(BUNDLE) == f"{start}{name}"}

    def _create(self, record: RegisteredVersion, uri: str, tags: Mapping[str, str]) -> Any:
        from mlflow.exceptions import MlflowException

        try:
            self._client.create_registered_model(record.model)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        return self._client.create_model_version(
            record.model,
            uri,
            run_id=record.properties.get(MLFLOW_RUN),
            tags={STAGE: CANDIDATE, **tags},
            description=record.description,
            await_creation_for=0,
        )

    def _set_tags(self, known: Any, tags: Mapping[str, str]) -> None:
        """Set those tags of a version that differ."""
        for name, value in tags.items():
            if known.tags.get(name) != value:
                self._client.set_model_version_tag(known.name, known.version, name, value)

    def _set_alias(self, known: Any) -> None:
        """Let the alias name a version; MLflow would call webhooks for the same one again."""
        aliases = self._client.get_registered_model(known.name).aliases
        if str(aliases.get(CHAMPION)) != str(known.version):
            self._client.set_registered_model_alias(known.name, CHAMPION, known.version)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn MLflow's errors into ours, of one line."""
        from mlflow.exceptions import MlflowException

        try:
            yield
        except MlflowException as error:
            reason = one_line(str(error).rpartition("Caused by ")[2])
            if error.error_code in DENIALS:
                raise InputError(
                    f"the MLflow server {self.address} denies access ({reason}): set "
                    "MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and "
                    "MLFLOW_TRACKING_PASSWORD, as keys of the bucket's secret"
                ) from None
            raise StorageError(
                f"the MLflow server {self.address} does not respond as expected ({reason}): "
                f"correct {_URI}, or look at its log, then resume the run by Retry"
            ) from None


def mlflow_registry(settings: Registering, where: Store | None) -> MlflowRegistry:
    """Return the registry that `MLFLOW_TRACKING_URI` names; InputError without it or library."""
    address = os.environ.get(_URI, "").rstrip("/")
    if not _ADDRESS.fullmatch(address):
        raise InputError(
            f"registry=mlflow needs {_URI}, an address such as https://mlflow.example.com without "
            "a login: set this variable, for steps by a key of the bucket's secret or KFP's MLflow "
            "plugin"
        )
    if address.startswith("http") and isinstance(where, Folder):
        raise InputError(
            f"registry=mlflow needs a bucket as destination, not {where.uri}, because an MLflow "
            "server refuses folders: give gs://, s3:// or az://"
        )
    return MlflowRegistry(address, settings.registry_author)
