"""A dataset that each reader brings: the same version for all, whatever the source gains since."""

from pathlib import Path

import pytest

from kfp_ddp.core import folders
from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.core.run_folder import RunFolder
from kfp_ddp.datasets.access import EachNode, local_dataset, options_on_nodes
from kfp_ddp.datasets.options import Options
from kfp_ddp.datasets.sync import sync


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
    listed = sync(str(source), tmp_path / "none", Options(dry_run=True))
    return EachNode(str(source), "ds", listed.digest, options_on_nodes({})).address()


def test_a_folder_is_at_hand_as_it_is(source: Path, run_dir: Path) -> None:
    with local_dataset(str(source), run_dir) as data:
        assert data == source
    assert list(run_dir.iterdir()) == []


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


def test_options_are_those_of_any_folder() -> None:
    given = {"exclude": ["*.md"], "dry_run": True, "verify": "full", "max_delete": 0.1}
    assert options_on_nodes(given) == {"exclude": ["*.md"], "max_delete": 1.0}
    with pytest.raises(InputError, match="delete=false"):
        options_on_nodes({"delete": False})


@pytest.mark.parametrize("text", ["each-node:", "each-node:[1]", 'each-node:{"source": "x"}'])
def test_an_address_that_says_nothing_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="names no dataset"):
        EachNode.parse(text)
