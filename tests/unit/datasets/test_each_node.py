"""A dataset that each reader brings: the same version for all; and the step dataset_volume."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kfp_ddp.components.dataset_volume.component import dataset_volume
from kfp_ddp.core import folders
from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.core.run_folder import RunFolder
from kfp_ddp.datasets.access import EachNode, local_dataset, options_on_nodes
from kfp_ddp.datasets.options import SyncOptions
from kfp_ddp.datasets.sync import sync
from kfp_ddp.datasets.volume.request import VolumeRequest


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source/train/cat"
    folder.mkdir(parents=True)
    (folder / "1.jpg").write_bytes(b"1")
    return tmp_path / "source"


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of the run, on a pod with room of its own."""
    monkeypatch.setenv(folders.SCRATCH_VARIABLE, str(tmp_path / "scratch"))
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def address(source: Path, tmp_path: Path) -> str:
    listed = sync(str(source), tmp_path / "none", SyncOptions(dry_run=True))
    return EachNode(str(source), "ds", listed.digest, options_on_nodes({})).address()


def test_who_comes_later_brings_what_the_first_one_brought(
    source: Path, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = address(source, tmp_path)
    with local_dataset(dataset, run_dir, "run-1") as data:
        assert (data / "train/cat/1.jpg").read_bytes() == b"1"
    assert RunFolder(run_dir).dataset.exists()
    (source / "train/cat/2.jpg").write_bytes(b"2")
    monkeypatch.setenv(folders.SCRATCH_VARIABLE, str(tmp_path / "another-pod"))
    with local_dataset(dataset, run_dir, "run-1") as again:
        assert again.name == data.name
        assert [path.name for path in (again / "train/cat").iterdir()] == ["1.jpg"]


@pytest.mark.parametrize("first", [True, False])
def test_a_source_that_is_another_by_now_is_refused(
    source: Path, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    """Before the first node has it, what was added counts too."""
    dataset = address(source, tmp_path)
    if not first:
        with local_dataset(dataset, run_dir):
            pass
        monkeypatch.setenv(folders.SCRATCH_VARIABLE, str(tmp_path / "another-pod"))
    name = "2.jpg" if first else "1.jpg"
    (source / "train/cat" / name).write_bytes(b"another")
    with pytest.raises(StorageError, match=r"by now, but the run started with .*: start a new run"):
        local_dataset(dataset, run_dir).__enter__()


DEEP = f"each-node:{'[' * 100_000}"


@pytest.mark.parametrize("text", ["each-node:", "each-node:[1]", 'each-node:{"source": "x"}', DEEP])
def test_an_address_that_says_nothing_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="names no dataset"):
        EachNode.parse(text)


INPUTS = {"dataset": "digits", "digest": "5" * 64, "path": "/data/versions/5", "claim": "data"}


def step(folder: Path, **inputs: Any) -> Any:
    """The component as a program calls it, outside of any cluster."""
    report = SimpleNamespace(path=str(folder / "report.md"), metadata={})
    return dataset_volume.python_func(volume_report=report, **INPUTS | inputs)


def test_options_reach_the_request() -> None:
    given = {"keep_claims": 1.0, "wait_seconds": 60, "storage_class": "fast"}  # as KFP sends them
    request = VolumeRequest.create(**INPUTS, **given)
    assert (request.keep_claims, request.wait_seconds, request.storage_class) == (1, 60, "fast")
    assert request.name == "ds-digits-555555555555"


def test_none_changes_nothing(tmp_path: Path) -> None:
    assert tuple(step(tmp_path, publish="none")) == ("data", "/data/versions/5")
    assert "nothing was published" in (tmp_path / "report.md").read_text()


def test_on_each_node_there_is_an_address_of_what_to_bring(tmp_path: Path) -> None:
    sync = {"exclude": ["*.md"], "dry_run": True, "verify": "full", "max_delete": 0.1}
    claim, path = step(tmp_path, publish="each-node", source="gs://bucket/ds", sync=sync)
    assert claim == "data"
    parsed = EachNode.parse(path)
    assert (parsed.source, parsed.dataset, parsed.digest) == ("gs://bucket/ds", "digits", "5" * 64)
    assert parsed.options == {"exclude": ["*.md"], "max_delete": 1.0}
    assert f"downloads version {'5' * 12} of gs://bucket/ds" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize(
    ("inputs", "why"),
    [
        ({"publish": "each-node"}, "publish=each-node needs the source"),
        ({"dataset": ""}, "dataset='' cannot be used: it should be at most 40 lower-case letters"),
        ({"digest": "5" * 63}, "cannot be used: it should be the digest that data_sync returned"),
        ({"publish": "nonsense"}, "publish='nonsense' is unknown: it is one of auto, in-place"),
        ({"options": {"keep_claim": 1}}, "options has no setting 'keep_claim'; did you mean"),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path: Path, inputs: dict[str, Any], why: str) -> None:
    with pytest.raises(SystemExit, match=re.escape(why)):
        step(tmp_path, **inputs)
