"""The version is told in one place; every other is written from it."""

import subprocess
import tomllib
from pathlib import Path

import pytest

from kfp_ddp import __version__, reference

REPOSITORY = Path(__file__).parents[2]


def test_the_version_is_told_once() -> None:
    found = subprocess.run(
        [
            "git",
            "grep",
            "-l",
            "--fixed-strings",
            __version__,
            "--",
            ":!*.lock",
            ":!compiled",
            ":!tests",
            ":!CHANGELOG.md",
        ],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    texts = {name: (REPOSITORY / name).read_text() for name in found}
    told = [name for name in found if __version__ in reference.IMAGE.sub("", texts[name])]
    assert told == ["kfp_ddp/__init__.py"]
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    assert project["tool"]["hatch"]["version"]["path"] == "kfp_ddp/__init__.py"


def test_a_new_version_reaches_every_place_that_names_an_image(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    naming = subprocess.run(
        ["git", "grep", "-lE", r"kfp-ddp/(launcher|trainer):[0-9]", "--", ":!compiled"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert "components/train/component.py" in naming
    monkeypatch.setattr(reference, "__version__", "9.8.7")
    written = {
        path.relative_to(REPOSITORY).as_posix()
        for path, text in reference._documents()
        if "launcher:9.8.7" in text or "trainer:9.8.7" in text
    }
    assert set(naming) <= written
