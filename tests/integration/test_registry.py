"""Models in Kubeflow Model Registry: told once, whole in the end, and as CHAMPION has it.

The tests that use `address` hold for any registry: `KFP_DDP_TEST_REGISTRY=http://…` names a real
one for them. Without it, and in all others, a stand-in keeps to the contract alone.
"""

import asyncio
import os
import secrets
import shutil
from pathlib import Path
from typing import Any

import pytest
from model_registry import ModelRegistry
from model_registry.types import ListOptions

from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.export.publish import Lineage
from kfp_ddp.models.champion import move
from kfp_ddp.models.registry import Registry, agree, client, register, registry_of
from kfp_ddp.models.release import Registering
from kfp_ddp.storage.kinds import open_store
from kfp_ddp.storage.store import Store
from tests.exports import exported
from tests.registry_server import server as faults
from tests.registry_server.server import RegistryServer


@pytest.fixture
def address(registry_server: RegistryServer) -> str:
    """Of a real registry, where one is named."""
    return os.environ.get("KFP_DDP_TEST_REGISTRY") or registry_server.url


@pytest.fixture
def where(tmp_path: Path) -> Store:
    """A destination of exports."""
    (tmp_path / "models").mkdir()
    return open_store(str(tmp_path / "models"))


@pytest.fixture
def name() -> str:
    """Of a model that no registry has."""
    return f"flowers-{secrets.token_hex(4)}"


def opened(address: str, **more: Any) -> Registry:
    found = registry_of(Registering(registry=address, **more))
    assert found is not None
    return found


def published(where: Store, name: str, tmp_path: Path, wrong: int, champion: str = "") -> str:
    """Upload a version, with so many wrong."""
    folder = tmp_path / f"bundle-{wrong}"
    return exported(where, name, folder, wrong, Lineage(f"run-{wrong}", name, champion))


def told(address: str, name: str) -> dict[str, dict[str, Any]]:
    """What a registry has of a model's versions, by its client."""

    async def read(api: Any) -> dict[str, dict[str, Any]]:
        model = await api.get_registered_model_by_params(name)
        found = {}
        for each in await api.get_model_versions(model.id, ListOptions()):
            artifact = await api.get_model_artifact_by_params(name, each.id)
            found[each.name] = {
                **(each.custom_properties or {}),
                "state": each.state.value,
                "author": each.author,
                "uri": artifact and artifact.uri,
                "format": artifact and artifact.model_format_name,
                "source": artifact and artifact.model_source_id,
            }
        return found

    return opened(address)._call("read", read)


def test_a_version_is_registered_with_its_lineage(
    address: str, where: Store, name: str, tmp_path: Path
) -> None:
    before = published(where, name, tmp_path, 9)
    version = published(where, name, tmp_path, 3, before)
    register(opened(address, registry_author="ana"), where, name, version)
    (said,) = told(address, name).values()
    assert said["stage"] == "candidate"
    assert said["state"] == "LIVE"
    assert said["author"] == "ana"
    assert said["bundle"] == f"{where.uri}/{name}/{version}"
    assert said["run_id"] == said["source"] == "run-3"
    assert said["dataset_digest"] == "d" * 64
    assert said["compared_with"] == before
    assert said["training.epochs"] == 3
    assert said["accuracy"] == pytest.approx(57 / 60)
    assert said["samples"] == 60
    assert said["signed"] is False
    assert said["uri"] == f"{said['bundle']}/model.safetensors"
    assert said["format"] == "safetensors"


def test_registering_again_asks_and_changes_nothing(
    registry_server: RegistryServer, where: Store, name: str, tmp_path: Path
) -> None:
    version = published(where, name, tmp_path, 3)
    move(where, name, version, "", "run-3")
    for _ in range(2):
        register(opened(registry_server.url), where, name, version)
        agree(opened(registry_server.url), where, name)
    assert registry_server.changes() == [
        "create_registered_model",
        "create_model_version",
        "upsert_model_version_artifact",
        "update_model_version",
        "update_registered_model",
    ]


@pytest.mark.parametrize("fault", [faults.status(500), faults.gone, faults.done_but_lost])
@pytest.mark.parametrize(
    "operation",
    ["create_registered_model", "create_model_version", "upsert_model_version_artifact"],
)
def test_a_registration_that_was_interrupted_is_completed_by_the_next(
    registry_server: RegistryServer,
    where: Store,
    name: str,
    tmp_path: Path,
    operation: str,
    fault: faults.Fault,
) -> None:
    version = published(where, name, tmp_path, 3)
    registry_server.fail(operation, fault)
    with pytest.raises(StorageError, match=r"the registry http\S+ (refused|does not respond)"):
        register(opened(registry_server.url), where, name, version)
    registry_server.faults.clear()
    register(opened(registry_server.url), where, name, version)
    (said,) = told(registry_server.url, name).values()
    assert said["source"] == "run-3"
    assert [
        len(rows) for rows in (registry_server.store.models, registry_server.store.artifacts)
    ] == [1, 1]


@pytest.mark.parametrize("operation", ["*", "create_model_version"])
def test_a_fault_that_passes_is_waited_for(
    registry_server: RegistryServer,
    where: Store,
    name: str,
    tmp_path: Path,
    operation: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "PATIENCE", 60)
    version = published(where, name, tmp_path, 3)
    registry_server.fail(operation, faults.status(503), 1)
    registry_server.fail(operation, faults.gone, 1)
    registry_server.fail(operation, faults.done_but_lost, 1)
    register(opened(registry_server.url), where, name, version)
    assert list(told(registry_server.url, name)) == [version]


def test_two_that_register_at_once_have_one_version(
    registry_server: RegistryServer, where: Store, name: str, tmp_path: Path
) -> None:
    version = published(where, name, tmp_path, 3)

    def other_first(handler: faults.Handler) -> bool:
        registry_server.faults.clear()
        register(opened(registry_server.url), where, name, version)
        return False

    for operation in ("create_registered_model", "create_model_version"):
        registry_server.fail(operation, other_first, 1)
        register(opened(registry_server.url), where, name, version)
        assert list(told(registry_server.url, name)) == [version]
        for rows in (
            registry_server.store.models,
            registry_server.store.versions,
            registry_server.store.artifacts,
        ):
            assert len(rows) == 1
        registry_server.store.versions.clear()
        registry_server.store.artifacts.clear()


def stages(address: str, name: str) -> dict[str, Any]:
    return {version: said["stage"] for version, said in told(address, name).items()}


def test_stages_follow_the_champion(address: str, where: Store, name: str, tmp_path: Path) -> None:
    registry = opened(address)
    one, two, three = (published(where, name, tmp_path, wrong) for wrong in (9, 6, 3))
    for version in (one, two, three):
        register(registry, where, name, version)
    agree(registry, where, name)
    assert set(stages(address, name).values()) == {"candidate"}
    move(where, name, one, "", "run-9")
    agree(registry, where, name)
    assert stages(address, name) == {one: "champion", two: "candidate", three: "candidate"}
    move(where, name, three, one, "run-3")
    agree(registry, where, name)
    assert stages(address, name) == {one: "former", two: "candidate", three: "champion"}
    move(where, name, one, three, "rollback")
    agree(registry, where, name)
    assert stages(address, name) == {one: "champion", two: "candidate", three: "former"}


def test_at_no_time_are_there_two_champions(
    registry_server: RegistryServer, where: Store, name: str, tmp_path: Path
) -> None:
    registry = opened(registry_server.url)
    one, two = (published(where, name, tmp_path, wrong) for wrong in (9, 6))
    for each in (one, two):
        register(registry, where, name, each)
    move(where, name, one, "", "run")
    agree(registry, where, name)
    for before, version in ((one, two), (two, one)):
        move(where, name, version, before, "run")
        seen: list[int] = []

        def looked(_: faults.Handler, seen: list[int] = seen) -> bool:
            found = (each["customProperties"] for each in registry_server.store.versions)
            seen.append([each["stage"]["string_value"] for each in found].count("champion"))
            return False

        registry_server.fail("*", looked)
        agree(registry, where, name)
        registry_server.faults.clear()
        assert set(seen) == {0, 1}


def test_a_version_whose_bundle_is_gone_is_archived_until_it_is_back(
    address: str, where: Store, name: str, tmp_path: Path
) -> None:
    registry = opened(address)
    one, two = (published(where, name, tmp_path, wrong) for wrong in (9, 6))
    for version in (one, two):
        register(registry, where, name, version)
    move(where, name, two, "", "run-6")
    shutil.rmtree(tmp_path / "models" / name / one)
    agree(registry, where, name)
    assert stages(address, name) == {one: "archived", two: "champion"}
    assert told(address, name)[one]["state"] == "ARCHIVED"
    assert published(where, name, tmp_path, 8) != one
    assert stages(address, name)[one] == "archived"


def test_the_champion_is_registered_where_it_was_not(
    address: str, where: Store, name: str, tmp_path: Path
) -> None:
    version = published(where, name, tmp_path, 3)
    move(where, name, version, "", "run-3")
    agree(opened(address), where, name)
    assert stages(address, name) == {version: "champion"}


def test_versions_of_others_stay_as_they_are(
    address: str, where: Store, name: str, tmp_path: Path
) -> None:
    other = ModelRegistry(address, author="ben", user_token="t", async_runner=asyncio.run)
    other.register_model(
        name,
        "s3://elsewhere/model",
        model_format_name="onnx",
        model_format_version="1",
        version="1.0",
        metadata={"stage": "champion", "bundle": "s3://elsewhere/1.0"},
    )
    version = published(where, name, tmp_path, 3)
    move(where, name, version, "", "run-3")
    agree(opened(address), where, name)
    assert stages(address, name) == {"1.0": "champion", version: "champion"}


def test_more_versions_than_a_page_has_are_all_told(
    registry_server: RegistryServer,
    where: Store,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "PAGE", 2)
    made = [published(where, name, tmp_path, wrong) for wrong in range(1, 6)]
    for version in made:
        register(opened(registry_server.url), where, name, version)
    move(where, name, made[0], "", "")
    agree(opened(registry_server.url), where, name)
    move(where, name, made[4], made[0], "")
    agree(opened(registry_server.url), where, name)
    found = {each["name"]: each["customProperties"] for each in registry_server.store.versions}
    assert found[made[0]]["stage"]["string_value"] == "former"
    assert found[made[4]]["stage"]["string_value"] == "champion"


@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        (faults.status(401), InputError, r"\(401: injected\): set registry_token"),
        (faults.status(403), InputError, r"\(403: injected\): set registry_token"),
        (faults.status(404), StorageError, r"refused .*\(404: injected\)"),
        (faults.status(422, "no\nway"), StorageError, r"refused .*\(422: no way\)"),
        (faults.status(503), StorageError, r"refused .*\(503: injected\)"),
        (faults.gone, StorageError, r"does not respond \(Server disconnected\)"),
        (faults.silence, StorageError, r"does not respond \(TimeoutError\)"),
        (faults.page(), InputError, "not respond like Model Registry's API"),
        (faults.page(404), StorageError, r"refused .*\(404\): look"),
        (faults.page(502), StorageError, r"refused .*\(502\): look"),
        (faults.other_json, InputError, "not respond like Model Registry's API"),
    ],
)
def test_a_registry_that_is_down_or_refuses_is_told_in_one_line(
    registry_server: RegistryServer,
    where: Store,
    name: str,
    tmp_path: Path,
    fault: faults.Fault,
    error: type[Exception],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if fault is faults.silence:
        monkeypatch.setattr(client, "ANSWER", 1.0)
    registry_server.fail("create_registered_model", fault)
    version = published(where, name, tmp_path, 3)
    with pytest.raises(error, match=words) as caught:
        register(opened(registry_server.url), where, name, version)
    assert "\n" not in str(caught.value)
    assert not registry_server.store.models


def test_a_look_at_a_registry_changes_nothing(registry_server: RegistryServer) -> None:
    opened(registry_server.url).check()
    registry_server.fail("*", faults.page())
    with pytest.raises(InputError, match="not respond like Model Registry's API"):
        opened(registry_server.url).check()
    assert registry_server.changes() == []


def test_a_registry_that_is_not_there_is_told_in_one_line(registry_server: RegistryServer) -> None:
    with pytest.raises(StorageError, match=r"does not respond \(Cannot connect to host"):
        opened("http://127.0.0.1:9").check()


def test_the_token_comes_from_the_secret(
    registry_server: RegistryServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    registry_server.token = "open sesame"
    with pytest.raises(InputError, match=r"denies access \(401: Unauthorized\)"):
        opened(registry_server.url).check()
    with pytest.raises(InputError, match="registry_token names the key word, which the bucket's"):
        opened(registry_server.url, registry_token="word")
    monkeypatch.setenv("word", "open sesame\n")
    opened(registry_server.url, registry_token="word").check()
    (tmp_path / "token").write_text("open sesame\n")
    monkeypatch.setenv("KF_PIPELINES_SA_TOKEN_PATH", str(tmp_path / "token"))
    opened(registry_server.url).check()


def test_the_token_of_the_account_is_not_sent_in_the_clear(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("of the account")
    monkeypatch.setattr(client, "_POD_TOKEN", tmp_path / "token")
    assert client._own_token(encrypted=True) == "of the account"
    assert client._own_token(encrypted=False) == ""


def test_a_bundle_that_is_missing_or_damaged_is_not_registered(
    registry_server: RegistryServer, where: Store, name: str, tmp_path: Path
) -> None:
    version = published(where, name, tmp_path, 3)
    with pytest.raises(InputError, match=r"there is no complete bundle"):
        register(opened(registry_server.url), where, name, "0" * 12)
    (tmp_path / "models" / name / version / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"config\.json is not what MANIFEST\.sha256 lists"):
        register(opened(registry_server.url), where, name, version)
    assert registry_server.asked() == []
