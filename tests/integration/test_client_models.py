"""`kfp-ddp models`, `promote` and `rollback`."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kfp_ddp.cli import app
from kfp_ddp.client import models
from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.export.publish import Lineage
from kfp_ddp.models.champion import move, read_pointer
from kfp_ddp.storage.kinds import open_store
from kfp_ddp.storage.store import Store
from tests.exports import exported
from tests.registry_server.server import RegistryServer, status


@pytest.fixture(params=["folder", "bucket"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty destination of each kind."""
    if request.param == "bucket":
        request.getfixturevalue("emulator")
        return open_store("gs://models/exports")
    (tmp_path / "exports").mkdir()
    return open_store(str(tmp_path / "exports"))


@pytest.fixture
def line(where: Store, tmp_path: Path) -> list[str]:
    """Three versions of flowers, each of which took the place of the one before."""
    made = [""]
    for number in range(3):
        lineage = Lineage(f"run-{number}", f"{where.uri}/flowers", made[-1])
        made.append(exported(where, "flowers", tmp_path / str(number), 9 - number, lineage))
        move(where, "flowers", made[-1], made[-2], f"run-{number}")
    return made[1:]


def call(where: Store, *words: str) -> Result:
    return CliRunner().invoke(app, [*words, "--destination", where.uri])


def document(where: Store, *words: str) -> Any:
    done = call(where, *words, "--json")
    assert done.exception is None, done.output
    return json.loads(done.stdout)


def refused(where: Store, *words: str) -> str:
    """Return the error of a command that does not change the champion."""
    before = read_pointer(where, "flowers")
    done = call(where, *words)
    assert isinstance(done.exception, InputError), done.output
    assert "\n" not in str(done.exception)
    assert read_pointer(where, "flowers") == before
    return str(done.exception)


def test_versions_are_listed_with_lineage(where: Store, line: list[str], tmp_path: Path) -> None:
    other = exported(where, "birds", tmp_path / "birds", 3, Lineage())
    assert document(where, "models") == {
        "birds": {"champion": "", "versions": [other]},
        "flowers": {"champion": line[2], "versions": sorted(line)},
    }
    assert f"flowers: champion {line[2]}, 3 versions" in call(where, "models").output
    models_document = document(where, "models", "flowers")
    version = next(one for one in models_document["versions"] if one["version"] == line[1])
    assert version.pop("exported_at")
    assert version == {
        "version": line[1],
        "uri": f"{where.uri}/flowers/{line[1]}",
        "champion": False,
        "damaged": "",
        "accuracy": 52 / 60,
        "samples": 60,
        "architecture": "resnet18",
        "run_id": "run-1",
        "dataset_digest": "d" * 64,
        "compared_with": line[0],
        "settings": {"epochs": 8},
    }
    assert [one["version"] for one in models_document["champions"]] == line
    shown = call(where, "models", "flowers").output
    assert f"{line[2]}  champion  accuracy 0.8833 of 60, resnet18, data dddddddddddd" in shown
    assert f"{line[2]} replaced {line[1]} by run-2" in shown


def test_rollback_goes_back_step_by_step_and_promote_forward(where: Store, line: list[str]) -> None:
    first, second, third = line
    assert document(where, "rollback", "flowers") == {
        "name": "flowers", "champion": second, "replaced": third
    }  # fmt: skip
    assert document(where, "rollback", "flowers")["champion"] == first
    assert f"{first} is the first known champion" in refused(where, "rollback", "flowers")
    assert document(where, "promote", "flowers", third[:6])["replaced"] == first
    assert document(where, "rollback", "flowers")["champion"] == first
    document(where, "promote", "flowers", third)
    for name, _ in list(where.list("flowers/CHAMPIONS")):
        where.delete(name)  # without a history, the bundle's lineage has the previous champion
    assert document(where, "rollback", "flowers")["champion"] == second


def test_an_invalid_version_is_no_champion(where: Store, line: list[str], tmp_path: Path) -> None:
    for path in (tmp_path / "0").iterdir():
        where.put(path, f"flowers/{'f' * 12}/{path.name}")
    message = refused(where, "promote", "flowers", "fff")
    assert "its files belong to another version" in message
    where.update(f"flowers/{line[1]}/metrics.json", lambda _: b"{}")
    assert "metrics.json is not what MANIFEST.sha256 lists" in refused(where, "rollback", "flowers")
    assert "cannot be the champion" in refused(where, "promote", "flowers", line[1])
    assert "! the champion" in call(where, "models", "flowers").output
    where.delete(f"flowers/{line[1]}/_SUCCESS")
    message = refused(where, "rollback", "flowers")
    assert f"the champion of flowers before {line[2]}, was deleted from {where.uri}" in message
    assert line[0] in message


def test_unknown_names_are_errors_of_one_line(where: Store, line: list[str]) -> None:
    assert "did you mean 'flowers'" in refused(where, "models", "flower")
    assert "did you mean 'flowers'" in refused(where, "promote", "flowrs", line[0])
    assert "'zz' matches no version of flowers" in refused(where, "promote", "flowers", "zz")
    message = refused(where, "promote", "flowers", line[0], "--instead-of", line[1])
    assert f"the champion of flowers is {line[2]}, not {line[1]}" in message
    assert "already" in call(where, "promote", "flowers", line[2]).output


def test_a_champion_that_changes_meanwhile_is_not_replaced(
    where: Store, line: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    described = models.describe

    def while_it_is_verified(*given: Any) -> models.Version:
        where.update("flowers/CHAMPION", lambda _: f"{line[1]}\n".encode())
        return described(*given)

    monkeypatch.setattr(models, "describe", while_it_is_verified)
    done = call(where, "promote", "flowers", line[0])
    assert isinstance(done.exception, StorageError)
    assert f"was set to {line[1]} meanwhile" in str(done.exception)
    assert read_pointer(where, "flowers") == line[1]


def test_a_destination_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    done = CliRunner().invoke(app, ["models"])
    assert "no destination is set: give --destination" in str(done.exception)
    done = CliRunner().invoke(app, ["models", "--destination", str(tmp_path / "no")])
    assert "not found: correct" in str(done.exception)
    assert CliRunner().invoke(app, ["models", "--destination", str(tmp_path)]).stdout == ""


@pytest.mark.parametrize("where", ["folder"], indirect=True)
def test_registry_follows(where: Store, line: list[str], registry_server: RegistryServer) -> None:
    def stages() -> dict[str, str]:
        versions = registry_server.store.versions
        return {one["name"]: one["customProperties"]["stage"]["string_value"] for one in versions}

    for words in (["promote", "flowers", line[0]], ["rollback", "flowers"]):
        done = call(where, *words, "--model-registry", registry_server.url)
        assert done.exception is None, done.output
    assert stages() == {line[0]: "former", line[2]: "champion"}
    registry_server.fail("update_model_version", status(500))
    done = call(where, "rollback", "flowers", "--model-registry", registry_server.url)
    assert isinstance(done.exception, StorageError)
    registry_server.faults.clear()
    assert read_pointer(where, "flowers") == line[1]
    done = call(where, "promote", "flowers", line[1], "--model-registry", registry_server.url)
    assert "already" in done.output
    assert stages() == {line[0]: "former", line[1]: "champion", line[2]: "former"}


@pytest.mark.parametrize("where", ["folder"], indirect=True)
def test_where_the_registry_is_down_the_champion_stays(
    where: Store, line: list[str], registry_server: RegistryServer
) -> None:
    registry_server.fail("*", status(503))
    for words in (["promote", "flowers", line[0]], ["rollback", "flowers"]):
        done = call(where, *words, "--model-registry", registry_server.url)
        assert isinstance(done.exception, StorageError), done.output
        assert "\n" not in str(done.exception)
        assert read_pointer(where, "flowers") == line[2]
    assert "model_registry" not in refused(where, "promote", "flowers", "zz")
    message = refused(where, "promote", "flowers", line[0], "--model-registry", "localhost:8080")
    assert "it should be an address such as http://model-registry-service" in message
