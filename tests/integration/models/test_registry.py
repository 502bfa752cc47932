"""Kubeflow Model Registry: registered once, complete in the end, with the stages of CHAMPION.

The tests that use `address` hold for any registry: `KFP_DDP_TEST_REGISTRY=http://…` names a real
one for them. Without it, and in all others, a stand-in follows the contract of the API.
"""

import os
import secrets
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from model_registry.types import ListOptions, ModelVersion, RegisteredModel

from kfp_ddp.components.register.component import register as register_step
from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.export.publish import Lineage
from kfp_ddp.models.champion import move
from kfp_ddp.models.registry import client
from kfp_ddp.models.registry.client import KubeflowRegistry, kubeflow_registry
from kfp_ddp.models.release import Registering
from kfp_ddp.storage.kinds import open_store
from kfp_ddp.storage.store import Store
from tests.exports import exported
from tests.kfp_server import faults
from tests.registry_server.server import RegistryServer, status
from tests.serving import Fault, Handler


@pytest.fixture
def address(registry_server: RegistryServer) -> str:
    """The address of a real registry if one is named, else of the stand-in."""
    return os.environ.get("KFP_DDP_TEST_REGISTRY") or registry_server.url


class Model(NamedTuple):
    """A model that no registry has, and the destination of its exports."""

    where: Store
    name: str
    folder: Path

    def publish(self, wrong: int, champion: str = "") -> str:
        """Upload a version with this number of wrong predictions."""
        folder = self.folder / f"bundle-{wrong}"
        lineage = Lineage(f"run-{wrong}", self.name, champion)
        return exported(self.where, self.name, folder, wrong, lineage)

    def register(self, address: str, version: str) -> None:
        opened(address).register(self.where, self.name, version)

    def published(self, address: str, *wrong: int) -> list[str]:
        """Upload and register versions."""
        versions = [self.publish(each) for each in wrong]
        for version in versions:
            self.register(address, version)
        return versions

    def promote(self, address: str, version: str, before: str) -> None:
        """Make a version the champion, also in the registry."""
        move(self.where, self.name, version, before, "run")
        opened(address).agree(self.where, self.name)

    def stages(self, address: str) -> dict[str, Any]:
        return {version: row["stage"] for version, row in registered(address, self.name).items()}


@pytest.fixture
def model(tmp_path: Path) -> Model:
    (tmp_path / "models").mkdir()
    name = f"flowers-{secrets.token_hex(4)}"
    return Model(open_store(str(tmp_path / "models")), name, tmp_path)


def opened(address: str, **settings: Any) -> KubeflowRegistry:
    return kubeflow_registry(Registering(registry=address, **settings))


def registered(address: str, name: str) -> dict[str, dict[str, Any]]:
    """Read a model's versions from a registry."""

    async def read(api: Any) -> dict[str, dict[str, Any]]:
        model = await api.get_registered_model_by_params(name)
        versions = {}
        for version in await api.get_model_versions(model.id, ListOptions()):
            artifact = await api.get_model_artifact_by_params(name, version.id)
            versions[version.name] = {
                **(version.custom_properties or {}),
                "state": version.state.value,
                "author": version.author,
                "uri": artifact and artifact.uri,
                "format": artifact and artifact.model_format_name,
                "source": artifact and artifact.model_source_id,
            }
        return versions

    registry = opened(address)
    registry.check()  # which finds the version of the API
    return registry._call("read", read)


def test_a_version_has_its_lineage(address: str, model: Model) -> None:
    before = model.publish(9)
    version = model.publish(3, before)
    opened(address, registry_author="ana").register(model.where, model.name, version)
    (row,) = registered(address, model.name).values()
    bundle = f"{model.where.uri}/{model.name}/{version}"
    expected = {
        "stage": "candidate",
        "state": "LIVE",
        "author": "ana",
        "bundle": bundle,
        "run_id": "run-3",
        "source": "run-3",
        "dataset_digest": "d" * 64,
        "compared_with": before,
        "training.epochs": 3,
        "accuracy": pytest.approx(57 / 60),
        "samples": 60,
        "signed": False,
        "uri": f"{bundle}/model.safetensors",
        "format": "safetensors",
    }
    assert {key: row[key] for key in expected} == expected


def test_registering_again_changes_nothing(registry_server: RegistryServer, model: Model) -> None:
    version = model.publish(3)
    for before in ("", version):
        model.register(registry_server.url, version)
        model.promote(registry_server.url, version, before)
    assert registry_server.changes() == [
        "create_registered_model",
        "create_model_version",
        "upsert_model_version_artifact",
        "update_model_version",
        "update_registered_model",
    ]


@pytest.mark.parametrize("fault", [status(500), faults.gone, faults.lost])
@pytest.mark.parametrize(
    "operation",
    ["create_registered_model", "create_model_version", "upsert_model_version_artifact"],
)
def test_an_interrupted_registration_is_completed_by_the_next(
    registry_server: RegistryServer, model: Model, operation: str, fault: Fault
) -> None:
    version = model.publish(3)
    registry_server.fail(operation, fault)
    with pytest.raises(StorageError):
        model.register(registry_server.url, version)
    registry_server.heal()
    model.register(registry_server.url, version)
    (row,) = registered(registry_server.url, model.name).values()
    assert row["source"] == "run-3"
    store = registry_server.store
    assert [len(store.models), len(store.artifacts)] == [1, 1]


@pytest.mark.parametrize("operation", ["*", "create_model_version"])
def test_requests_are_repeated_after_temporary_faults(
    registry_server: RegistryServer, model: Model, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "PATIENCE", 60)
    version = model.publish(3)
    for fault in (status(503), faults.gone, faults.lost):
        registry_server.fail(operation, fault, 1)
    model.register(registry_server.url, version)
    assert list(registered(registry_server.url, model.name)) == [version]


def test_two_writers_create_one_version(registry_server: RegistryServer, model: Model) -> None:
    version, store = model.publish(3), registry_server.store

    def other_first(handler: Handler, _: RegistryServer) -> bool:
        registry_server.heal()
        model.register(registry_server.url, version)
        return True

    for operation in ("create_registered_model", "create_model_version"):
        registry_server.fail(operation, other_first, 1)
        model.register(registry_server.url, version)
        assert list(registered(registry_server.url, model.name)) == [version]
        assert [len(rows) for rows in (store.models, store.versions, store.artifacts)] == [1, 1, 1]
        store.versions.clear()
        store.artifacts.clear()


def test_stages_follow_the_champion(address: str, model: Model) -> None:
    one, two, three = model.published(address, 9, 6, 3)
    opened(address).agree(model.where, model.name)
    assert set(model.stages(address).values()) == {"candidate"}
    for version, before, expected in (
        (one, "", ["champion", "candidate", "candidate"]),
        (three, one, ["former", "candidate", "champion"]),
        (one, three, ["champion", "candidate", "former"]),
    ):
        model.promote(address, version, before)
        assert model.stages(address) == dict(zip((one, two, three), expected, strict=True))
    shutil.rmtree(model.folder / "models" / model.name / two)
    opened(address).agree(model.where, model.name)
    assert model.stages(address) == {one: "champion", two: "archived", three: "former"}
    assert registered(address, model.name)[two]["state"] == "ARCHIVED"


def test_there_are_never_two_champions(registry_server: RegistryServer, model: Model) -> None:
    one, two = model.published(registry_server.url, 9, 6)
    model.promote(registry_server.url, one, "")
    for before, version in ((one, two), (two, one)):
        champions: list[int] = []

        def count(*_: object, champions: list[int] = champions) -> bool:
            properties = (row["customProperties"] for row in registry_server.store.versions)
            named = [row["stage"]["string_value"] for row in properties]
            champions.append(named.count("champion"))
            return True

        registry_server.fail("*", count)
        model.promote(registry_server.url, version, before)
        registry_server.heal()
        assert set(champions) == {0, 1}


def test_a_missing_champion_leaves_other_versions_unchanged(address: str, model: Model) -> None:
    async def register_foreign(api: Any) -> None:
        theirs = await api.upsert_registered_model(RegisteredModel(name=model.name))
        custom = {"stage": "champion", "bundle": "s3://elsewhere/1.0"}
        one = ModelVersion(name="1.0", author="ben", custom_properties=custom)
        await api.upsert_model_version(one, theirs.id)

    registry = opened(address)
    registry.check()
    registry._call("registered", register_foreign)
    version = model.publish(3)
    model.promote(address, version, "")
    assert model.stages(address) == {"1.0": "champion", version: "champion"}


def test_all_pages_of_versions_are_read(
    registry_server: RegistryServer, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "PAGE", 2)
    versions = model.published(registry_server.url, *range(1, 6))
    for version, before in ((versions[0], ""), (versions[4], versions[0])):
        model.promote(registry_server.url, version, before)
    rows = {row["name"]: row["customProperties"] for row in registry_server.store.versions}
    assert rows[versions[0]]["stage"]["string_value"] == "former"
    assert rows[versions[4]]["stage"]["string_value"] == "champion"


@pytest.mark.parametrize(
    ("fault", "error", "text"),
    [
        (status(401), InputError, r"\(401: injected\): set registry_token"),
        (status(403), InputError, r"\(403: injected\): set registry_token"),
        (status(422, "no\nway"), StorageError, r"refused .*\(422: no way\)"),
        (faults.gone, StorageError, "does not respond"),
        (faults.silence, StorageError, "does not respond"),
        (faults.page, InputError, "not respond like Model Registry's API"),
        (faults.proxy_error(404), StorageError, r"refused .*\(404\)"),
        (faults.proxy_error(502), StorageError, r"refused .*\(502\)"),
        (faults.answer('{"items": [{}]}'), InputError, "not respond like Model Registry's API"),
    ],
)
def test_a_faulty_registry_fails_with_one_line_error(
    registry_server: RegistryServer,
    model: Model,
    fault: Fault,
    error: type[Exception],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if fault is faults.silence:
        monkeypatch.setattr(client, "ANSWER", 1.0)
    registry_server.fail("create_registered_model", fault)
    version = model.publish(3)
    with pytest.raises(error, match=text):
        model.register(registry_server.url, version)
    assert not registry_server.store.models


def test_a_check_changes_nothing(registry_server: RegistryServer) -> None:
    opened(registry_server.url).check()
    registry_server.fail("*", faults.page)
    with pytest.raises(InputError, match="not respond like Model Registry's API"):
        opened(registry_server.url).check()
    assert registry_server.changes() == []
    with pytest.raises(StorageError, match="does not respond"):
        opened("http://127.0.0.1:9").check()


def test_token_in_secret(registry_server: RegistryServer, monkeypatch: pytest.MonkeyPatch) -> None:
    registry_server.token = "open sesame"
    with pytest.raises(InputError, match=r"denies access \(401: Unauthorized\)"):
        opened(registry_server.url).check()
    with pytest.raises(InputError, match="registry_token names the key word"):
        opened(registry_server.url, registry_token="word")
    monkeypatch.setenv("word", "open sesame\n")
    opened(registry_server.url, registry_token="word").check()


@pytest.mark.parametrize("mounted", [True, False])
def test_token_needs_https(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mounted: bool) -> None:
    (tmp_path / "token").write_text("of the account")
    if mounted:
        monkeypatch.setenv("KF_PIPELINES_SA_TOKEN_PATH", str(tmp_path / "token"))
    else:
        monkeypatch.setattr(client, "_POD_TOKEN", tmp_path / "token")
    assert opened("https://registry")._token == "of the account"
    assert opened("http://registry")._token == ""


@pytest.mark.parametrize("api", ["v1", "v1alpha3"])
def test_servers_of_both_apis_are_used(
    registry_server: RegistryServer, model: Model, capsys: pytest.CaptureFixture[str], api: str
) -> None:
    registry_server.api = api
    model.promote(registry_server.url, model.publish(3), "")
    assert set(model.stages(registry_server.url).values()) == {"champion"}
    assert ("v1alpha3" in capsys.readouterr().out) == (api == "v1alpha3")


@pytest.fixture
def versions(model: Model) -> list[str]:
    """Two versions, of which the second is the champion."""
    versions = [model.publish(wrong) for wrong in (9, 3)]
    move(model.where, model.name, versions[1], "", "run-3")
    return versions


def run(model: Model, server: RegistryServer, **changed: Any) -> str:
    """Run the `register` step."""
    inputs: dict[str, Any] = {"destination": model.where.uri, "model_name": model.name}
    inputs |= {"release": {"registry": server.url}, **changed}
    return str(register_step.python_func(**inputs))


def test_the_step_registers_the_champion_or_a_given_version(
    versions: list[str], model: Model, registry_server: RegistryServer
) -> None:
    assert run(model, registry_server) == versions[1]
    assert run(model, registry_server, version=versions[0]) == versions[0]
    expected = dict(zip(versions, ["candidate", "champion"], strict=True))
    assert model.stages(registry_server.url) == expected


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"release": {}}, "release names no registry"),
        ({"model_name": "other"}, "has no champion"),
        ({"version": "0" * 12}, "there is no complete bundle"),
        ({"version": "../x"}, "version='../x' is invalid"),
    ],
)
def test_invalid_input_fails_before_any_request(
    versions: list[str],
    model: Model,
    registry_server: RegistryServer,
    changed: dict[str, Any],
    text: str,
) -> None:
    with pytest.raises(SystemExit, match=f"^error: .*{text}"):
        run(model, registry_server, **changed)
    bundle = Path(model.where.uri, model.name, versions[1])
    (bundle / "config.json").write_text("{}")
    with pytest.raises(SystemExit, match=r"config\.json is not what MANIFEST\.sha256 lists"):
        run(model, registry_server)
    assert registry_server.asked() == []
