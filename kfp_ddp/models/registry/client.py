"""Kubeflow Model Registry through its client: a call that is made again changes nothing."""

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable, Container, Mapping
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.core.step import needed_secret
from kfp_ddp.core.text import one_line
from kfp_ddp.models.registry.record import BUNDLE, Record, Value
from kfp_ddp.models.release import Registering

if TYPE_CHECKING:
    from model_registry.types import ModelVersion, RegisteredModel

R = TypeVar("R")
Api = Any
"""`ModelRegistryAPIClient`, which has no types."""
PATIENCE = 60.0
"""Seconds to try what a server did not answer, or answered with a fault of its own."""
LOOK = 10.0
"""The same where it is only looked at."""
PAUSE = 0.5
"""Seconds before the second try; each pause after that is twice as long."""
ANSWER = 30.0
"""Seconds that one try may take."""
STAGE, CHAMPION = "stage", "champion"
CANDIDATE, FORMER, ARCHIVED = "candidate", "former", "archived"
PAGE = 100
_TOKEN_FILE = "KF_PIPELINES_SA_TOKEN_PATH"  # noqa: S105
_POD_TOKEN = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")


class Registry:
    """One server, asked as one author."""

    def __init__(self, address: str, token: str, author: str) -> None:
        if find_spec("model_registry") is None:
            raise InputError(
                f"the registry {address} needs its client: pip install 'kfp-ddp[registry]'"
            )
        self.address = address.rstrip("/")
        self._token = token
        self._author = author

    def check(self) -> None:
        """See that it answers and lets us in.

        Raises:
            InputError: it is no registry, or refuses the token.
            StorageError: it does not answer.
        """
        from model_registry.types import ListOptions

        options = ListOptions(limit=1)
        self._asked("listed", lambda api: api.get_registered_models(options), LOOK)

    def register(self, record: Record) -> str:
        """Have a version with its artifact; what is there already as it is said stays untouched.

        Args:
            record: The version.

        Returns:
            Its id.

        Raises:
            InputError: the registry refuses the token.
            StorageError: it does not answer, or refuses the version.
        """
        return self._asked("registered", lambda api: self._register(api, record))

    def agree(self, model: str, place: str, champion: str, there: Container[str]) -> bool:
        """Make the stages of a model's versions what its destination says.

        Args:
            model: Its name.
            place: Address of the model's exports; versions of other places are left as they are.
            champion: The version that CHAMPION names; '' for none.
            there: The versions that lie at the destination.

        Returns:
            Whether the champion is registered, or there is none.

        Raises:
            InputError: the registry refuses the token.
            StorageError: it does not answer.
        """
        return self._asked("told", lambda api: self._agree(api, model, place, champion, there))

    async def _register(self, api: Api, record: Record) -> str:
        from model_registry.types import ModelArtifact, ModelVersion, RegisteredModel
        from mr_openapi import ArtifactState

        model: RegisteredModel = await _had(
            lambda: api.get_registered_model_by_params(record.model),
            lambda: api.upsert_registered_model(
                RegisteredModel(name=record.model, owner=self._author)
            ),
        )
        said = {STAGE: CANDIDATE, **record.properties}
        version: ModelVersion = await _had(
            lambda: api.get_model_version_by_params(str(model.id), record.version),
            lambda: api.upsert_model_version(
                ModelVersion(
                    name=record.version,
                    author=self._author,
                    description=record.description,
                    custom_properties=said,
                ),
                model.id,
            ),
        )
        await _amended(api, version, said | _stage_of(version))
        source = {
            "model_source_kind": "kfp",
            "model_source_class": "pipelinerun",
            "model_source_id": record.run_id,
        }
        wanted: dict[str, Any] = {
            "uri": record.uri,
            "model_format_name": record.format,
            "model_format_version": "1",
            "state": ArtifactState.LIVE,
            **(source if record.run_id else {}),
        }
        artifact: ModelArtifact = await _had(
            lambda: api.get_model_artifact_by_params(record.model, str(version.id)),
            lambda: api.upsert_model_version_artifact(
                ModelArtifact(name=record.model, **wanted), str(version.id)
            ),
        )
        if any(getattr(artifact, name) != value for name, value in wanted.items()):
            await api.upsert_model_artifact(artifact.model_copy(update=wanted))
        return str(version.id)

    async def _agree(
        self, api: Api, model: str, place: str, champion: str, there: Container[str]
    ) -> bool:
        from mr_openapi import ModelVersionState as State

        found = await api.get_registered_model_by_params(model)
        if found is None:
            return not champion
        ours = [
            each
            for each in await _versions(api, found)
            if (each.custom_properties or {}).get(BUNDLE) == f"{place}/{each.name}"
        ]
        # The new champion last: at no time are there two.
        for each in sorted(ours, key=lambda one: one.name == champion):
            stage = _stage(each.name, champion, there, _stage_of(each).get(STAGE, CANDIDATE))
            state = State.ARCHIVED if stage == ARCHIVED else State.LIVE
            await _amended(api, each, {STAGE: stage}, state)
        registered = any(each.name == champion for each in ours)
        if registered and (found.custom_properties or {}).get(CHAMPION) != champion:
            named = {**(found.custom_properties or {}), CHAMPION: champion}
            changed = found.model_copy(update={"custom_properties": named})
            await api.upsert_registered_model(changed)
        return registered or not champion

    def _asked(
        self, what: str, ask: Callable[[Api], Awaitable[R]], patience: float | None = None
    ) -> R:
        """Ask until there is an answer, and say in one line what it is where it is none.

        Raises:
            InputError: it refuses the token, or is no registry.
            StorageError: it does not answer, or refuses what is asked.
        """
        import aiohttp
        from mr_openapi.exceptions import ApiException, OpenApiException

        until, pause = time.monotonic() + (PATIENCE if patience is None else patience), PAUSE
        while True:
            try:
                return asyncio.run(asyncio.wait_for(self._connected(ask), ANSWER))
            except ApiException as error:
                if not 500 <= (error.status or 0) <= 599 or time.monotonic() + pause > until:
                    raise self._refused(what, error) from None
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                if time.monotonic() + pause > until:
                    why = one_line(error)
                    raise StorageError(
                        f"the registry {self.address} does not answer ({why}): nothing is lost, "
                        "let the run go on by Retry once it does"
                    ) from None
            except (OpenApiException, ValueError, AssertionError, AttributeError) as error:
                raise InputError(
                    f"{self.address} answers with something else than Model Registry's API: "
                    "correct the address of the registry"
                ) from error
            time.sleep(pause)
            pause *= 2

    async def _connected(self, ask: Callable[[Api], Awaitable[R]]) -> R:
        """Ask over one connection; by itself the client makes one for each request."""
        from model_registry.core import ModelRegistryAPIClient
        from mr_openapi import ApiClient, Configuration, ModelRegistryServiceApi

        configuration = Configuration(host=self.address, access_token=self._token or None)
        async with ApiClient(configuration) as connection:
            api = ModelRegistryAPIClient(configuration)
            api.get_client = lambda: nullcontext(ModelRegistryServiceApi(connection))
            return await ask(api)

    def _refused(self, what: str, error: Any) -> InputError | StorageError:
        said = _message(error)
        if error.status in (401, 403):
            return InputError(
                f"the registry {self.address} refuses us ({error.status}{said}): name a key of the "
                "bucket's secret with a token that it takes, registry_token"
            )
        return StorageError(
            f"the registry {self.address} did not let it be {what} ({error.status}{said}): "
            "look at its log, then let the run go on by Retry"
        )


def registry_of(settings: Registering) -> Registry | None:
    """The registry that the settings name; None where they name none.

    Raises:
        InputError: the secret lacks the token that they name, or there is no client.
    """
    if not settings.registry:
        return None
    if settings.registry_token:
        token = needed_secret(settings.registry_token, "registry_token")
    else:
        token = _own_token(settings.registry.startswith("https://"))
    return Registry(settings.registry, token, settings.registry_author)


def _own_token(encrypted: bool) -> str:
    """The token that the pod has for its own; that of its account is not sent in the clear."""
    named = os.environ.get(_TOKEN_FILE, "")
    for path in [Path(named)] if named else [_POD_TOKEN] if encrypted else []:
        try:
            return path.read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            continue
    return ""


async def _versions(api: Api, model: "RegisteredModel") -> "list[ModelVersion]":
    from model_registry.types import ListOptions

    options = ListOptions.order_by_id(limit=PAGE)
    found: list[ModelVersion] = await api.get_model_versions(str(model.id), options)
    while options.next_page_token:
        found += await api.get_model_versions(str(model.id), options)
    return found


async def _amended(
    api: Api, version: "ModelVersion", said: Mapping[str, Value], state: Any = None
) -> None:
    """Let a version say this too, and be in this state, if it does not yet."""
    known, state = version.custom_properties or {}, state or version.state
    if version.state == state and all(known.get(name) == value for name, value in said.items()):
        return
    update = {"custom_properties": {**known, **said}, "state": state}
    await api.upsert_model_version(version.model_copy(update=update))


async def _had(find: Callable[[], Awaitable[Any]], make: Callable[[], Awaitable[Any]]) -> Any:
    """What is there, else what is made; where another one made it meanwhile, that."""
    from mr_openapi.exceptions import ApiException

    found = await find()
    if found is not None:
        return found
    try:
        return await make()
    except ApiException:
        found = await find()
        if found is None:
            raise
        return found


def _stage(version: str, champion: str, there: Container[str], before: Value) -> str:
    if version == champion:
        return CHAMPION
    if version not in there:
        return ARCHIVED
    return FORMER if before in (CHAMPION, FORMER) else CANDIDATE


def _stage_of(version: "ModelVersion") -> dict[str, Value]:
    """The stage that a version has, as properties have it; none where it says none."""
    known = version.custom_properties or {}
    return {STAGE: known[STAGE]} if STAGE in known else {}


def _message(error: Any) -> str:
    """What the server says of a refusal, where it says so in its own form."""
    try:
        said = json.loads(error.body)["message"]
    except (TypeError, ValueError, KeyError):
        return ""
    return f": {one_line(said)}"
