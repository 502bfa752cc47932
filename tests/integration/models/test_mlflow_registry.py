"""MLflow's model registry: registered once, with the alias and the stages of CHAMPION.

The client is that of a server. The fast tests let it keep the registry in files, and the slow ones
run them again with a real server.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from kfp_ddp.components.register.component import register as register_step
from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.export.publish import Lineage
from kfp_ddp.models.champion import delete, move
from kfp_ddp.models.registry import Registry, registry_of
from kfp_ddp.models.release import Registering
from kfp_ddp.storage.kinds import open_store
from kfp_ddp.storage.store import Store
from tests.exports import exported
from tests.serving import Handler, free_port, serving_by
from tests.stores import mlflow

NAME = "flowers"
PASSWORD = "a long password"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an MLflow server with a login."""
    with mlflow(tmp_path_factory.mktemp("mlflow"), PASSWORD) as url:
        yield url


@pytest.fixture(params=["files", pytest.param("server", marks=pytest.mark.slow)])
def where(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Store]:
    """An empty destination whose kind the registry accepts; MLFLOW_TRACKING_URI names this."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    uri = f"file://{tmp_path}/mlflow"
    destination = str(tmp_path / "models")
    (tmp_path / "models").mkdir()
    if request.param == "server":
        request.getfixturevalue("emulator")
        uri = request.getfixturevalue("server")
        destination = "gs://models/exports"
        monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "admin")
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", PASSWORD)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    yield open_store(destination)
    with contextlib.suppress(Exception):
        MlflowClient().delete_registered_model(NAME)


@pytest.fixture
def versions(where: Store, tmp_path: Path) -> list[str]:
    """Three versions at the destination, none of which is the champion."""
    return [upload(where, tmp_path, wrong) for wrong in (9, 6, 3)]


def upload(where: Store, tmp_path: Path, wrong: int, run: str = "") -> str:
    lineage = Lineage(f"run-{wrong}", mlflow_run_id=run)
    return exported(where, NAME, tmp_path / f"bundle-{wrong}", wrong, lineage)


def opened(where: Store | None, **settings: Any) -> Registry:
    registry = registry_of(Registering(registry="mlflow", **settings), where)
    assert registry is not None
    return registry


def registered() -> list[Any]:
    """Return MLflow's versions of the model, in their order."""
    rows = MlflowClient().search_model_versions(f"name = '{NAME}'")
    return sorted(rows, key=lambda row: int(row.version))


def stages() -> dict[str, str]:
    return {row.tags["version"]: row.tags["stage"] for row in registered()}


def test_a_version_has_its_lineage_and_its_run(where: Store, tmp_path: Path) -> None:
    run = MlflowClient().create_run("0").info.run_id
    version = upload(where, tmp_path, 3, run)
    number = opened(where, registry_author="ana").register(where, NAME, version)
    (row,) = registered()
    bundle = f"{where.uri}/{NAME}/{version}"
    assert (str(row.version), row.source, row.run_id) == (number, bundle, run)
    assert row.description.startswith("resnet")
    expected = {
        "stage": "candidate",
        "version": version,
        "bundle": bundle,
        "uri": f"{bundle}/model.safetensors",
        "format": "safetensors",
        "author": "ana",
        "run_id": "run-3",
        "training.epochs": "3",
        "samples": "60",
        "signed": "False",
    }
    assert {name: row.tags[name] for name in expected} == expected


def test_registering_again_adds_and_changes_nothing(
    where: Store, versions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    move(where, NAME, versions[0], "", "run")
    registry = opened(where)
    registry.agree(where, NAME)
    (before,) = registered()
    monkeypatch.delattr(MlflowClient, "set_registered_model_alias")
    number = registry.register(where, NAME, versions[0])
    registry.agree(where, NAME)
    (row,) = registered()
    assert (number, row.tags) == (str(before.version), before.tags)
    assert MlflowClient().get_registered_model(NAME).aliases["champion"] == number
    assert row.last_updated_timestamp == before.last_updated_timestamp
    MlflowClient().set_model_version_tag(NAME, number, "accuracy", "1.0")
    registry.register(where, NAME, versions[0])
    (row,) = registered()
    assert row.tags == before.tags


def test_alias_and_stages_follow_the_champion(where: Store, versions: list[str]) -> None:
    one, two, three = versions
    registry = opened(where)
    for version in versions:
        registry.register(where, NAME, version)
    registry.agree(where, NAME)
    assert set(stages().values()) == {"candidate"}
    for version, before, expected in (
        (one, "", ["champion", "candidate", "candidate"]),
        (three, one, ["former", "candidate", "champion"]),
        (one, three, ["champion", "candidate", "former"]),
    ):
        move(where, NAME, version, before, "run")
        registry.agree(where, NAME)
        assert stages() == dict(zip(versions, expected, strict=True))
        named = MlflowClient().get_model_version_by_alias(NAME, "champion")
        assert named.tags["version"] == version
    assert delete(open_store(f"{where.uri}/{NAME}"), two)
    registry.agree(where, NAME)
    assert stages() == {one: "champion", two: "archived", three: "former"}


def test_a_missing_champion_leaves_other_versions_unchanged(
    where: Store, versions: list[str]
) -> None:
    MlflowClient().create_registered_model(NAME)
    theirs = {"stage": "champion", "version": "1.0", "bundle": "s3://elsewhere/1.0"}
    MlflowClient().create_model_version(NAME, "s3://elsewhere/1.0", tags=theirs)
    MlflowClient().create_model_version(NAME, "s3://elsewhere/2.0")
    move(where, NAME, versions[0], "", "run")
    opened(where).agree(where, NAME)
    first, second, ours = registered()
    assert (first.tags, second.tags) == (theirs, {})
    assert (ours.tags["version"], ours.tags["stage"]) == (versions[0], "champion")


def test_the_first_of_two_equal_versions_counts(where: Store, versions: list[str]) -> None:
    """Two steps at the same time may create one, because MLflow's own numbers differ."""
    registry = opened(where)
    registry.register(where, NAME, versions[0])
    (row,) = registered()
    MlflowClient().create_model_version(NAME, row.source, tags=row.tags)
    move(where, NAME, versions[0], "", "run")
    registry.agree(where, NAME)
    assert [one.tags["stage"] for one in registered()] == ["champion", "candidate"]


def test_the_step_registers_the_champion(where: Store, versions: list[str]) -> None:
    move(where, NAME, versions[1], "", "run")
    inputs = {"destination": where.uri, "model_name": NAME, "release": {"registry": "mlflow"}}
    assert register_step.python_func(**inputs) == versions[1]
    assert stages() == {versions[1]: "champion"}


@pytest.mark.parametrize("uri", ["", "mlflow.example.com", "https://me:hunter2@mlflow.example.com"])
def test_no_server_is_named(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with pytest.raises(InputError, match="needs MLFLOW_TRACKING_URI") as caught:
        opened(None)
    assert "hunter2" not in str(caught.value)


def test_a_server_needs_a_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://mlflow.example.com")
    opened(open_store("gs://models"))
    with pytest.raises(InputError, match="needs a bucket as destination"):
        opened(open_store(str(tmp_path)))


class Refusal(Handler):
    """Answers each request with one status and text."""

    status: int
    text: bytes

    def do_GET(self) -> None:
        self.answer(self.status, self.text)


@pytest.mark.parametrize(
    ("status", "text", "error", "words"),
    [
        (401, b"You are not authenticated.", InputError, "set MLFLOW_TRACKING_TOKEN, or"),
        (403, b"Permission denied", InputError, "set MLFLOW_TRACKING_TOKEN, or"),
        (403, b'{"error_code": "PERMISSION_DENIED"}', InputError, "denies access"),
        (503, b"no database", StorageError, "resume the run by Retry"),
        (404, b"not found", StorageError, "correct MLFLOW_TRACKING_URI"),
        (200, b"<html>a login</html>", StorageError, "correct MLFLOW_TRACKING_URI"),
    ],
)
def test_a_faulty_server_fails_with_one_line(
    status: int,
    text: bytes,
    error: type[Exception],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    handler = type("Bound", (Refusal,), {"status": status, "text": text})
    with serving_by(handler) as url:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
        with pytest.raises(error, match=words) as caught:
            opened(None).check()
    assert "\n" not in str(caught.value)


def test_a_wrong_address_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(StorageError, match="resume the run by Retry"):
        opened(None).check()


@pytest.mark.slow
def test_a_login_of_a_server_is_needed(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "admin")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "another password")
    with pytest.raises(InputError, match="denies access"):
        opened(None).check()
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", PASSWORD)
    opened(None).check()
