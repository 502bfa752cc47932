"""The version is defined in one place; all others are generated from it."""

import subprocess
import tomllib
from pathlib import Path

import pytest

from kfp_ddp import __version__, reference

REPOSITORY = Path(__file__).parents[2]


def test_version_is_defined_once() -> None:
    names = subprocess.run(
        [
            *("git", "grep", "-l", "--fixed-strings", __version__, "--"),
            *(":!*.lock", ":!compiled", ":!tests", ":!CHANGELOG.md"),
        ],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    texts = {name: (REPOSITORY / name).read_text() for name in names}
    files = [name for name in names if __version__ in reference.IMAGE.sub("", texts[name])]
    assert files == ["kfp_ddp/__init__.py"]
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    assert project["tool"]["hatch"]["version"]["path"] == "kfp_ddp/__init__.py"


def test_new_version_reaches_all_references_to_images(
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
