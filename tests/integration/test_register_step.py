"""The component `register`: a bundle that was published before there was a registry."""

from pathlib import Path
from typing import Any

import pytest

from kfp_ddp.components.register.component import register
from kfp_ddp.export.publish import Lineage
from kfp_ddp.models.champion import move
from kfp_ddp.storage.kinds import open_store
from tests.exports import exported
from tests.registry_server.server import RegistryServer, status


@pytest.fixture
def versions(tmp_path: Path) -> list[str]:
    """Two versions of flowers, of which the second is the champion."""
    where = open_store(str(tmp_path / "models"))
    made = [
        exported(where, "flowers", tmp_path / str(wrong), wrong, Lineage(f"run-{wrong}"))
        for wrong in (9, 3)
    ]
    move(where, "flowers", made[1], "", "run-3")
    return made


def given(tmp_path: Path, server: RegistryServer, **changed: Any) -> dict[str, Any]:
    release = {"registry": server.url}
    return {
        "destination": str(tmp_path / "models"),
        "model_name": "flowers",
        "release": release,
        **changed,
    }


def test_the_champion_is_registered_and_a_version_that_is_named(
    versions: list[str], tmp_path: Path, registry_server: RegistryServer
) -> None:
    assert register.python_func(**given(tmp_path, registry_server)) == versions[1]
    assert (
        register.python_func(**given(tmp_path, registry_server, version=versions[0]))
        == (versions[0])
    )
    found = registry_server.store.versions
    assert {each["name"]: each["customProperties"]["stage"]["string_value"] for each in found} == {
        versions[0]: "candidate",
        versions[1]: "champion",
    }


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"release": {}}, "release names no registry"),
        ({"release": {"registy": "x"}}, "release has no setting 'registy'; did you mean"),
        ({"model_name": "other"}, "has no champion: publish a model first, or give version"),
        ({"model_name": "a/b"}, "model_name is 'a/b'"),
        ({"version": "0" * 12}, "there is no complete bundle"),
        ({"version": "../x"}, "version='../x' is invalid: it has 12 hexadecimal digits"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_asked(
    versions: list[str],
    tmp_path: Path,
    registry_server: RegistryServer,
    changed: dict[str, Any],
    words: str,
) -> None:
    with pytest.raises(SystemExit, match=f"^error: .*{words}"):
        register.python_func(**given(tmp_path, registry_server, **changed))
    assert registry_server.asked() == []


def test_a_registry_that_is_down_is_one_line(
    versions: list[str], tmp_path: Path, registry_server: RegistryServer
) -> None:
    registry_server.fail("*", status(503))
    with pytest.raises(SystemExit, match=r"^error: the registry \S+ refused"):
        register.python_func(**given(tmp_path, registry_server))
