"""Client of Kubeflow Model Registry; all calls are idempotent.

This uses the client below the library's class `ModelRegistry`, because in 0.3.18 that class

- cannot complete a version whose artifact is missing, after one lost answer: `register_model` then
  refuses the version, and no other method creates an artifact;
- gives artifacts no state, and has no timeout nor retry;
- sends the token of the pod's account over http, and refuses https without a token;
- adds a port behind the path of an address, and does not know the API of servers up to 0.3.8.
"""

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable, Container, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.core.log import log
from kfp_ddp.core.machine import require
from kfp_ddp.core.step import needed_secret
from kfp_ddp.core.text import one_line
from kfp_ddp.models.champion import list_versions, read_pointer
from kfp_ddp.models.registry.record import (
    ARCHIVED,
    BUNDLE,
    CANDIDATE,
    CHAMPION,
    STAGE,
    RegisteredVersion,
    Value,
    record_of,
    stage_of,
)
from kfp_ddp.models.release import Registering
from kfp_ddp.storage.store import Store

if TYPE_CHECKING:
    from model_registry.types import ModelVersion, RegisteredModel

R = TypeVar("R")
Api = Any
"""`ModelRegistryAPIClient`, which has no types."""
PATIENCE = 60.0
"""Seconds for retries on no response and on 5xx."""
LOOK = 10.0
"""The same for `check`."""
PAUSE = 0.5
"""Seconds before the first retry; doubles with each."""
ANSWER = 30.0
"""Timeout of one attempt in seconds."""
PAGE = 100
API = "/v1/"
"""The API in the paths of the client's requests."""
OLDER_API = "/v1alpha3/"
"""The API of servers up to 0.3.8, with the same requests."""
_TOKEN_FILE = "KF_PIPELINES_SA_TOKEN_PATH"  # noqa: S105
_POD_TOKEN = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")


class KubeflowRegistry:
    """A registry server; InputError if it denies access, StorageError if it does not respond."""

    def __init__(self, address: str, token: str, author: str) -> None:
        require("registry", f"the registry {address}")
        self.address = address.rstrip("/")
        self._token = token
        self._author = author
        self._api = API

    def check(self) -> None:
        """Raise an error if it does not respond or denies access; changes nothing."""
        from model_registry.types import ListOptions

        options = ListOptions(limit=1)
        self._call("listed", lambda api: api.get_registered_models(options), LOOK)

    def register(self, where: Store, model: str, version: str) -> str:
        """Register a bundle with its artifact, a candidate until `agree`; return its id."""
        record = record_of(where, model, version)
        return self._call("registered", lambda api: self._register(api, record))

    def agree(self, where: Store, model: str) -> None:
        """Set the stages of versions with bundles here by CHAMPION, registered if it is missing."""
        uri = f"{where.uri}/{model}"
        champion = read_pointer(where, model)
        existing = set(list_versions(where, model).get(model, []))

        def update(api: Api) -> Awaitable[bool]:
            return self._agree(api, model, uri, champion, existing)

        if not self._call("updated", update):
            self.register(where, model, champion)
            self._call("updated", update)

    async def _register(self, api: Api, record: RegisteredVersion) -> str:
        from model_registry.types import ModelArtifact, ModelVersion, RegisteredModel
        from mr_openapi import ArtifactState

        model: RegisteredModel = await _get_or_create(
            lambda: api.get_registered_model_by_params(record.model),
            lambda: api.upsert_registered_model(
                RegisteredModel(name=record.model, owner=self._author)
            ),
        )
        properties = {STAGE: CANDIDATE, **record.properties}
        new = ModelVersion(
            name=record.version,
            author=self._author,
            description=record.description,
            custom_properties=properties,
        )
        version: ModelVersion = await _get_or_create(
            lambda: api.get_model_version_by_params(str(model.id), record.version),
            lambda: api.upsert_model_version(new, model.id),
        )
        await _update(api, version, properties | _known_stage(version))
        desired: dict[str, Any] = {
            "uri": record.uri,
            "model_format_name": record.format,
            "model_format_version": "1",
            "state": ArtifactState.LIVE,
        }
        if record.run_id:
            desired |= {"model_source_kind": "kfp", "model_source_class": "pipelinerun"}
            desired |= {"model_source_id": record.run_id}
        artifact: ModelArtifact = await _get_or_create(
            lambda: api.get_model_artifact_by_params(record.model, str(version.id)),
            lambda: api.upsert_model_version_artifact(
                ModelArtifact(name=record.model, **desired), str(version.id)
            ),
        )
        if any(getattr(artifact, name) != value for name, value in desired.items()):
            await api.upsert_model_artifact(artifact.model_copy(update=desired))
        return str(version.id)

    async def _agree(
        self, api: Api, model: str, uri: str, champion: str, existing: Container[str]
    ) -> bool:
        """Return whether the champion is registered or there is none."""
        from mr_openapi import ModelVersionState as State

        registered_model = await api.get_registered_model_by_params(model)
        if registered_model is None:
            return not champion
        versions = [
            version
            for version in await _versions(api, registered_model)
            if (version.custom_properties or {}).get(BUNDLE) == f"{uri}/{version.name}"
        ]
        # The new champion last, so that there are never two.
        for version in sorted(versions, key=lambda one: one.name == champion):
            before = _known_stage(version).get(STAGE, CANDIDATE)
            stage = stage_of(version.name, champion, existing, before)
            state = State.ARCHIVED if stage == ARCHIVED else State.LIVE
            await _update(api, version, {STAGE: stage}, state)
        registered = any(version.name == champion for version in versions)
        properties = registered_model.custom_properties or {}
        if registered and properties.get(CHAMPION) != champion:
            update = {"custom_properties": {**properties, CHAMPION: champion}}
            await api.upsert_registered_model(registered_model.model_copy(update=update))
        return registered or not champion

    def _call(
        self, what: str, call: Callable[[Api], Awaitable[R]], patience: float | None = None
    ) -> R:
        """Make a call, with retries; `what` is the participle for the error message."""
        import aiohttp
        from mr_openapi.exceptions import ApiException, OpenApiException

        until = time.monotonic() + (PATIENCE if patience is None else patience)
        pause = PAUSE
        while True:
            try:
                return asyncio.run(asyncio.wait_for(self._connected(call), ANSWER))
            except ApiException as error:
                if self._api == API and "404 page not found" in str(error.body):
                    self._api = OLDER_API
                    log.info(f"the registry {self.address} has the API v1alpha3")
                    continue
                is_temporary = 500 <= (error.status or 0) <= 599
                if not is_temporary or time.monotonic() + pause > until:
                    raise self._refused(what, error) from None
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                if time.monotonic() + pause > until:
                    raise StorageError(
                        f"the registry {self.address} does not respond ({one_line(error)}): "
                        "nothing is lost, resume the run by Retry when it does"
                    ) from None
            except (OpenApiException, ValueError, AssertionError, AttributeError) as error:
                raise InputError(
                    f"{self.address} does not respond like Model Registry's API: "
                    "correct the address of the registry"
                ) from error
            time.sleep(pause)
            pause *= 2

    async def _connected(self, call: Callable[[Api], Awaitable[R]]) -> R:
        """Make a call over one connection; the client opens one for each request by default."""
        from model_registry.core import ModelRegistryAPIClient
        from mr_openapi import ApiClient, Configuration, ModelRegistryServiceApi

        configuration = Configuration(host=self.address, access_token=self._token or None)
        async with ApiClient(configuration) as connection:
            serialize = connection.param_serialize
            connection.param_serialize = lambda *, resource_path, **more: serialize(
                resource_path=resource_path.replace(API, self._api, 1), **more
            )
            api = ModelRegistryAPIClient(configuration)
            api.get_client = lambda: nullcontext(ModelRegistryServiceApi(connection))
            return await call(api)

    def _refused(self, what: str, error: Any) -> InputError | StorageError:
        message = ""
        with suppress(TypeError, ValueError, KeyError):
            message = f": {one_line(json.loads(error.body)['message'])}"
        if error.status in (401, 403):
            return InputError(
                f"the registry {self.address} denies access ({error.status}{message}): set "
                "registry_token to a key of the bucket's secret with a valid token"
            )
        return StorageError(
            f"the registry {self.address} refused the request, nothing was {what} "
            f"({error.status}{message}): look at its log, then resume the run by Retry"
        )


def kubeflow_registry(settings: Registering) -> KubeflowRegistry:
    """Return the registry of the settings; InputError without token or library."""
    token = ""
    if settings.registry_token:
        token = needed_secret(settings.registry_token, "registry_token")
    elif settings.registry.startswith("https://"):
        # The token of the pod's service account: over http anyone on the way could read it.
        with suppress(OSError, ValueError):
            file = os.environ.get(_TOKEN_FILE) or _POD_TOKEN
            token = Path(file).read_text(encoding="utf-8").strip()
    return KubeflowRegistry(settings.registry, token, settings.registry_author)


async def _versions(api: Api, model: "RegisteredModel") -> "list[ModelVersion]":
    from model_registry.types import ListOptions

    options = ListOptions.order_by_id(limit=PAGE)
    versions: list[ModelVersion] = await api.get_model_versions(str(model.id), options)
    while options.next_page_token:
        versions += await api.get_model_versions(str(model.id), options)
    return versions


async def _update(
    api: Api, version: "ModelVersion", properties: Mapping[str, Value], state: Any = None
) -> None:
    """Add properties to a version and set its state, if it differs."""
    known = version.custom_properties or {}
    update = {"custom_properties": {**known, **properties}, "state": state or version.state}
    changed = version.model_copy(update=update)
    if changed != version:
        await api.upsert_model_version(changed)


async def _get_or_create(
    get: Callable[[], Awaitable[Any]], create: Callable[[], Awaitable[Any]]
) -> Any:
    """Return the existing object, or create it; another writer may create it first."""
    from mr_openapi.exceptions import ApiException

    existing = await get()
    if existing is not None:
        return existing
    try:
        return await create()
    except ApiException:
        existing = await get()
        if existing is None:
            raise
        return existing


def _known_stage(version: "ModelVersion") -> dict[str, Value]:
    """Return the stage of a version as a property; empty if it has none."""
    known = version.custom_properties or {}
    return {STAGE: known[STAGE]} if STAGE in known else {}
