"""The steps of a release, and the workflows that run them."""

import json
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from kfp_ddp import __version__
from kfp_ddp.pipelines import NAMES
from release import artifacts
from release.artifacts import ROOT, ReleaseError
from release.verify import SDIST, WHEEL, verify

IMAGES = [f"example.com/ml/{name}@sha256:{'ab' * 32}" for name in ("launcher", "trainer")]
WORKFLOWS = [*ROOT.glob(".github/workflows/*"), ROOT / "examples" / "upload_on_merge.yaml"]
PINNED = re.compile(r"uses: (\./\S+|[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+)$", re.M)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A release, but for pipelines that were not compiled."""
    out = tmp_path_factory.mktemp("release")
    artifacts.packages(out)
    artifacts.sboms(out)
    (out / "compiled").mkdir()
    for name in NAMES:
        (out / "compiled" / f"{name}.yaml").write_text("\n".join(f"image: {x}" for x in IMAGES))
    return out


def forget_package(out: Path) -> None:
    sbom = json.loads((out / "server.cdx.json").read_text())
    del sbom["components"][7]
    (out / "server.cdx.json").write_text(json.dumps(sbom))


def add_module(out: Path) -> None:
    with zipfile.ZipFile(out / WHEEL, "a") as wheel:
        wheel.writestr("kfp_ddp/untracked.py", "")


DAMAGES: dict[str, Callable[[Path], Any]] = {
    SDIST: lambda out: (out / SDIST).unlink(),
    WHEEL: add_module,
    "server.cdx.json": forget_package,
    "sweep.yaml": lambda out: (out / "compiled/sweep.yaml").write_text("image: a.b/trainer:1.0"),
}


@pytest.mark.slow
def test_release_is_as_it_should_be(made: Path) -> None:
    artifacts.sums(made)
    verify(made, IMAGES)
    (made / artifacts.SUMS).write_text("")
    for images in (IMAGES, IMAGES[:1], ["a.b/launcher:1", IMAGES[1]]):
        with pytest.raises(ReleaseError):
            verify(made, images)


@pytest.mark.parametrize("part", DAMAGES)
def test_damaged_part_is_named(part: str, made: Path, tmp_path: Path) -> None:
    out = shutil.copytree(made, tmp_path / "out")
    DAMAGES[part](out)
    artifacts.sums(out)
    with pytest.raises(ReleaseError, match=re.escape(part)):
        verify(out, IMAGES)


def test_notes_are_of_this_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "ROOT", tmp_path)
    changes = tmp_path / "CHANGELOG.md"
    for title, tag in ((__version__, "v9.8.7"), ("Unreleased", "")):
        changes.write_text(f"# Changes\n\n## {title}\n\n- New.\n\n## 0.0.1\n")
        with pytest.raises(ReleaseError):
            artifacts.notes(tag)
    changes.write_text(f"# Changes\n\n## {__version__}\n\n- New.\n\n## 0.0.1\n")
    assert artifacts.notes() == artifacts.notes(f"v{__version__}") == "- New."


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_trust_nobody_else(path: Path) -> None:
    """Actions by commit, no rights but those of a job, and no text of others in a script."""
    text = path.read_text()
    assert text.count("uses: ") == len(PINNED.findall(text))
    workflow = yaml.safe_load(text)
    assert workflow["permissions"] in ({}, {"contents": "read"})
    assert workflow["concurrency"]
    for job in workflow["jobs"].values():
        assert not any("${{" in step.get("run", "") for step in job.get("steps", []))
