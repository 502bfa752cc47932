"""Kubeflow Model Registry: registered once, complete in the end, with the stages of CHAMPION.

The tests that use `address` hold for any registry: `KFP_DDP_TEST_REGISTRY=http://…` names a real
one for them. Without it, and in all others, a stand-in follows the contract of the API.
"""

import os
import secrets
import shutil
from pathlib import Path
from typing import Any

import pytest
from model_registry.types import ListOptions, ModelVersion, RegisteredModel

from kfp_ddp.components.register.component import register as register_step
from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.export.publish import Lineage
from kfp_ddp.models.champion import move
from kfp_ddp.models.registry import Registry, client, registry_of
from kfp_ddp.models.release import Registering
from kfp_ddp.storage.kinds import open_store
from kfp_ddp.storage.store import Store
from tests.exports import exported
from tests.registry_server import server as faults
from tests.registry_server.server import RegistryServer


@pytest.fixture
def address(registry_server: RegistryServer) -> str:
    """The address of a real registry if one is named, else of the stand-in."""
    return os.environ.get("KFP_DDP_TEST_REGISTRY") or registry_server.url


@pytest.fixture
def where(tmp_path: Path) -> Store:
    """A destination of exports."""
    (tmp_path / "models").mkdir()
    return open_store(str(tmp_path / "models"))


@pytest.fixture
def name() -> str:
    """The name of a model that no registry has."""
    return f"flowers-{secrets.token_hex(4)}"


def opened(address: str, **settings: Any) -> Registry:
    registry = registry_of(Registering(registry=address, **settings))
    assert registry is not None
    return registry


def published(where: Store, name: str, tmp_path: Path, wrong: int, champion: str = "") -> str:
    """Upload a version with this number of wrong predictions."""
    folder = tmp_path / f"bundle-{wrong}"
    return exported(where, name, folder, wrong, Lineage(f"run-{wrong}", name, champion))


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


def register_foreign(address: str, name: str) -> None:
    """Register version 1.0 of another program, which has our properties."""

    async def write(api: Any) -> None:
        model = await api.upsert_registered_model(RegisteredModel(name=name))
        custom = {"stage": "champion", "bundle": "s3://elsewhere/1.0"}
        version = ModelVersion(name="1.0", author="ben", custom_properties=custom)
        await api.upsert_model_version(version, model.id)

    registry = opened(address)
    registry.check()
    registry._call("registered", write)


def stages(address: str, name: str) -> dict[str, Any]:
    return {version: row["stage"] for version, row in registered(address, name).items()}


def test_a_version_has_its_lineage(address: str, where: Store, name: str, tmp_path: Path) -> None:
    before = published(where, name, tmp_path, 9)
    version = published(where, name, tmp_path, 3, before)
    opened(address, registry_author="ana").register(where, name, version)
    (row,) = registered(address, name).values()
    bundle = f"{where.uri}/{name}/{version}"
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


def test_registering_again_changes_nothing(
    registry_server: RegistryServer, where: Store, name: str, tmp_path: Path
) -> None:
    version = published(where, name, tmp_path, 3)
    move(where, name, version, "", "run-3")
    for _ in range(2):
        opened(registry_server.url).register(where, name, version)
        opened(registry_server.url).agree(where, name)
    assert registry_server.changes() == [
        "create_registered_model",
        "create_model_version",
        "upsert_model_version_artifact",
        "update_model_version",
        "update_registered_model",
    ]


@pytest.mark.parametrize("fault", [faults.status(500), faults.drop, faults.lose_answer])
@pytest.mark.parametrize(
    "operation",
    ["create_registered_model", "create_model_version", "upsert_model_version_artifact"],
)
def test_an_interrupted_registration_is_completed_by_the_next(
    registry_server: RegistryServer,
    where: Store,
    name: str,
    tmp_path: Path,
    operation: str,
    fault: faults.Fault,
) -> None:
    version = published(where, name, tmp_path, 3)
    registry_server.fail(operation, fault)
    with pytest.raises(StorageError):
        opened(registry_server.url).register(where, name, version)
    registry_server.faults.clear()
    opened(registry_server.url).register(where, name, version)
    (row,) = registered(registry_server.url, name).values()
    assert row["source"] == "run-3"
    store = registry_server.store
    assert [len(store.models), len(store.artifacts)] == [1, 1]


@pytest.mark.parametrize("operation", ["*", "create_model_version"])
def test_requests_are_repeated_after_temporary_faults(
    registry_server: RegistryServer,
    where: Store,
    name: str,
    tmp_path: Path,
    operation: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "PATIENCE", 60)
    version = published(where, name, tmp_path, 3)
    for fault in (faults.status(503), faults.drop, faults.lose_answer):
        registry_server.fail(operation, fault, 1)
    opened(registry_server.url).register(where, name, version)
    assert list(registered(registry_server.url, name)) == [version]


def test_two_writers_create_one_version(
    registry_server: RegistryServer, where: Store, name: str, tmp_path: Path
) -> None:
    version, store = published(where, name, tmp_path, 3), registry_server.store

    def other_first(handler: faults.Handler) -> bool:
        registry_server.faults.clear()
        opened(registry_server.url).register(where, name, version)
        return False

    for operation in ("create_registered_model", "create_model_version"):
        registry_server.fail(operation, other_first, 1)
        opened(registry_server.url).register(where, name, version)
        assert list(registered(registry_server.url, name)) == [version]
        assert [len(rows) for rows in (store.models, store.versions, store.artifacts)] == [1, 1, 1]
        store.versions.clear()
        store.artifacts.clear()


def test_stages_follow_the_champion(address: str, where: Store, name: str, tmp_path: Path) -> None:
    registry = opened(address)
    one, two, three = (published(where, name, tmp_path, wrong) for wrong in (9, 6, 3))
    for version in (one, two, three):
        registry.register(where, name, version)
    registry.agree(where, name)
    assert set(stages(address, name).values()) == {"candidate"}
    for version, before, expected in (
        (one, "", ["champion", "candidate", "candidate"]),
        (three, one, ["former", "candidate", "champion"]),
        (one, three, ["champion", "candidate", "former"]),
    ):
        move(where, name, version, before, "run")
        registry.agree(where, name)
        assert stages(address, name) == dict(zip((one, two, three), expected, strict=True))


def test_there_are_never_two_champions(
    registry_server: RegistryServer, where: Store, name: str, tmp_path: Path
) -> None:
    registry = opened(registry_server.url)
    one, two = (published(where, name, tmp_path, wrong) for wrong in (9, 6))
    for version in (one, two):
        registry.register(where, name, version)
    move(where, name, one, "", "run")
    registry.agree(where, name)
    for before, version in ((one, two), (two, one)):
        move(where, name, version, before, "run")
        champions: list[int] = []

        def count(_: faults.Handler, champions: list[int] = champions) -> bool:
            properties = (row["customProperties"] for row in registry_server.store.versions)
            named = [row["stage"]["string_value"] for row in properties]
            champions.append(named.count("champion"))
            return False

        registry_server.fail("*", count)
        registry.agree(where, name)
        registry_server.faults.clear()
        assert set(champions) == {0, 1}


def test_deleted_one_is_archived(address: str, where: Store, name: str, tmp_path: Path) -> None:
    registry = opened(address)
    one, two = (published(where, name, tmp_path, wrong) for wrong in (9, 6))
    for version in (one, two):
        registry.register(where, name, version)
    move(where, name, two, "", "run-6")
    shutil.rmtree(tmp_path / "models" / name / one)
    registry.agree(where, name)
    assert stages(address, name) == {one: "archived", two: "champion"}
    assert registered(address, name)[one]["state"] == "ARCHIVED"


def test_a_missing_champion_is_registered_and_other_versions_are_unchanged(
    address: str, where: Store, name: str, tmp_path: Path
) -> None:
    register_foreign(address, name)
    version = published(where, name, tmp_path, 3)
    move(where, name, version, "", "run-3")
    opened(address).agree(where, name)
    assert stages(address, name) == {"1.0": "champion", version: "champion"}


def test_all_pages_of_versions_are_read(
    registry_server: RegistryServer,
    where: Store,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "PAGE", 2)
    registry = opened(registry_server.url)
    versions = [published(where, name, tmp_path, wrong) for wrong in range(1, 6)]
    for version in versions:
        registry.register(where, name, version)
    for version, before in ((versions[0], ""), (versions[4], versions[0])):
        move(where, name, version, before, "")
        registry.agree(where, name)
    rows = {row["name"]: row["customProperties"] for row in registry_server.store.versions}
    assert rows[versions[0]]["stage"]["string_value"] == "former"
    assert rows[versions[4]]["stage"]["string_value"] == "champion"


@pytest.mark.parametrize(
    ("fault", "error", "text"),
    [
        (faults.status(401), InputError, r"\(401: injected\): set registry_token"),
        (faults.status(403), InputError, r"\(403: injected\): set registry_token"),
        (faults.status(404), StorageError, r"refused .*\(404: injected\)"),
        (faults.status(422, "no\nway"), StorageError, r"refused .*\(422: no way\)"),
        (faults.status(503), StorageError, r"refused .*\(503: injected\)"),
        (faults.drop, StorageError, "does not respond"),
        (faults.silence, StorageError, "does not respond"),
        (faults.page(), InputError, "not respond like Model Registry's API"),
        (faults.page(404), StorageError, r"refused .*\(404\)"),
        (faults.page(502), StorageError, r"refused .*\(502\)"),
        (faults.other_json, InputError, "not respond like Model Registry's API"),
    ],
)
def test_a_faulty_registry_fails_with_one_line_error(
    registry_server: RegistryServer,
    where: Store,
    name: str,
    tmp_path: Path,
    fault: faults.Fault,
    error: type[Exception],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if fault is faults.silence:
        monkeypatch.setattr(client, "ANSWER", 1.0)
    registry_server.fail("create_registered_model", fault)
    version = published(where, name, tmp_path, 3)
    with pytest.raises(error, match=text) as caught:
        opened(registry_server.url).register(where, name, version)
    assert "\n" not in str(caught.value)
    assert not registry_server.store.models


def test_a_check_changes_nothing(registry_server: RegistryServer) -> None:
    opened(registry_server.url).check()
    registry_server.fail("*", faults.page())
    with pytest.raises(InputError, match="not respond like Model Registry's API"):
        opened(registry_server.url).check()
    assert registry_server.changes() == []
    with pytest.raises(StorageError, match="does not respond"):
        opened("http://127.0.0.1:9").check()


def test_the_token_comes_from_the_secret(
    registry_server: RegistryServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    registry_server.token = "open sesame"
    with pytest.raises(InputError, match=r"denies access \(401: Unauthorized\)"):
        opened(registry_server.url).check()
    with pytest.raises(InputError, match="registry_token names the key word"):
        opened(registry_server.url, registry_token="word")
    monkeypatch.setenv("word", "open sesame\n")
    opened(registry_server.url, registry_token="word").check()
    (tmp_path / "token").write_text("open sesame\n")
    monkeypatch.setenv("KF_PIPELINES_SA_TOKEN_PATH", str(tmp_path / "token"))
    opened(registry_server.url).check()


def test_account_token_needs_https(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("of the account")
    monkeypatch.setattr(client, "_POD_TOKEN", tmp_path / "token")
    assert opened("https://registry")._token == "of the account"
    assert opened("http://registry")._token == ""


@pytest.mark.parametrize("api", ["v1", "v1alpha3"])
def test_servers_of_both_apis_are_used(
    registry_server: RegistryServer,
    where: Store,
    name: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    api: str,
) -> None:
    registry_server.api = api
    registry = opened(registry_server.url)
    move(where, name, published(where, name, tmp_path, 3), "", "run-3")
    registry.agree(where, name)
    assert set(stages(registry_server.url, name).values()) == {"champion"}
    assert ("v1alpha3" in capsys.readouterr().out) == (api == "v1alpha3")


@pytest.fixture
def versions(where: Store, tmp_path: Path) -> list[str]:
    """Two versions of flowers, of which the second is the champion."""
    versions = [published(where, "flowers", tmp_path, wrong) for wrong in (9, 3)]
    move(where, "flowers", versions[1], "", "run-3")
    return versions


def run(where: Store, server: RegistryServer, **changed: Any) -> str:
    """Run the `register` step."""
    release = {"registry": server.url}
    inputs = {"destination": where.uri, "model_name": "flowers", "release": release, **changed}
    return str(register_step.python_func(**inputs))


def test_the_step_registers_the_champion_or_a_given_version(
    versions: list[str], where: Store, registry_server: RegistryServer
) -> None:
    assert run(where, registry_server) == versions[1]
    assert run(where, registry_server, version=versions[0]) == versions[0]
    expected = dict(zip(versions, ["candidate", "champion"], strict=True))
    assert stages(registry_server.url, "flowers") == expected


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"release": {}}, "release names no registry"),
        ({"release": {"registy": "x"}}, "release has no setting 'registy'; did you mean"),
        ({"model_name": "other"}, "has no champion"),
        ({"model_name": "a/b"}, "model_name is 'a/b'"),
        ({"version": "0" * 12}, "there is no complete bundle"),
        ({"version": "../x"}, "version='../x' is invalid"),
    ],
)
def test_invalid_input_fails_before_any_request(
    versions: list[str],
    where: Store,
    registry_server: RegistryServer,
    changed: dict[str, Any],
    text: str,
) -> None:
    with pytest.raises(SystemExit, match=f"^error: .*{text}"):
        run(where, registry_server, **changed)
    (Path(where.uri) / "flowers" / versions[1] / "config.json").write_text("{}")
    with pytest.raises(SystemExit, match=r"config\.json is not what MANIFEST\.sha256 lists"):
        run(where, registry_server)
    assert registry_server.asked() == []
