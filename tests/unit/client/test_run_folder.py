"""A run's folder: its names are a contract with what earlier versions wrote."""

import io
import json
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kfp_ddp.client import pod_program
from kfp_ddp.client.run.run_files import StoredFiles, unpack
from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.core.run_folder import RunFolder, open_run_dir, task_title


def test_names_of_files_do_not_change() -> None:
    folder = RunFolder("/w/r")
    constants = {name for key, name in vars(RunFolder).items() if key.isupper()}
    assert {path.name for path in vars(folder).values()} | constants == {
        *("r", "config.json", "metrics.jsonl", "dataset.jsonl", "checkpoints", "begun-by", "logs"),
        *("tensorboard", "profile", "launcher.heartbeat", "process.json", "ranks", ".leases"),
        *("launcher.initial-weights", "bundle"),
    }
    assert folder.evaluation("val") == Path("/w/r/evaluation")
    assert folder.evaluation("test") == Path("/w/r/evaluation-test")
    assert folder.log_positions("job-1") == Path("/w/r/launcher.job-1.places.json")


@pytest.mark.parametrize("run_id", ["", "../other", "a/b", ".hidden", "x" * 129])
def test_invalid_run_id_is_an_error(tmp_path: Path, run_id: str) -> None:
    with pytest.raises(InputError, match="cannot name a folder"):
        open_run_dir(str(tmp_path), run_id, "train")
    with pytest.raises(InputError, match="cannot name a folder"):
        open_run_dir(str(tmp_path), "run", run_id)
    assert list(tmp_path.iterdir()) == []


def test_run_dir_is_created_or_an_error(tmp_path: Path) -> None:
    made = open_run_dir(str(tmp_path / "work"), "run", "train")
    assert made == (tmp_path / "work/run/train").resolve()
    assert list(made.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="Not a directory"):
        open_run_dir(str(tmp_path / "file"), "run", "train")


TASK_NAME = st.text("abcXYZ019._-/ äß", max_size=90) | st.sampled_from(["a" * 41, "a" * 41 + "b"])


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.sets(st.tuples(TASK_NAME, st.sampled_from(["", "2", "16", "b", "x" * 40])), min_size=2))
def test_titles_of_tasks_and_iterations_are_unique(tasks: set[tuple[str, str]]) -> None:
    tasks |= {("train", ""), ("train-2", ""), ("train.2", ""), ("train", "2"), ("a.b", "")}
    titles = {task_title(*task) for task in tasks}
    assert len(titles) == len(tasks)
    assert all(re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", t) for t in titles)
    assert task_title("train", "") == "train"
    assert task_title("train", "16") == "train.16"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with hidden files and a link out of it."""
    task = tmp_path / "run" / "train"
    (task / "bundle").mkdir(parents=True)
    (task / ".leases").mkdir()
    (task / "metrics.jsonl").write_text("{}\n")
    (task / "bundle" / "model").write_bytes(bytes(3 << 20))
    (task / ".leases" / "a").write_text("hidden")
    (task / ".begun").write_text("hidden")
    (task / "link").symlink_to("/etc/hostname")
    return tmp_path / "run"


def in_pod(root: Path, names: list[str] | None) -> bytes:
    """Run the program of the pod."""
    request = json.dumps({"root": str(root), "names": names}).encode() + b"\n"
    program = [sys.executable, "-c", Path(pod_program.__file__).read_text()]
    return subprocess.run(program, input=request, capture_output=True, check=True).stdout


def in_blocks(data: bytes, size: int = 1000) -> Iterator[bytes]:
    """Yield the data in small blocks."""
    yield from (data[at : at + size] for at in range(0, len(data), size))


def test_a_folder_and_a_pod_list_the_same_files(run: Path) -> None:
    sizes = {"train/metrics.jsonl": 3, "train/bundle/model": 3 << 20}
    assert StoredFiles(str(run)).sizes() == json.loads(in_pod(run, None)) == sizes
    missing = run / "none"
    assert StoredFiles(str(missing)).sizes() == json.loads(in_pod(missing, None)) == {}


def test_files_are_copied_and_missing_ones_and_links_are_skipped(run: Path, tmp_path: Path) -> None:
    (run / "train/bundle/second").hardlink_to(run / "train/bundle/model")
    names = ["train/bundle/model", "train/gone", "train/link", "train/bundle/second"]
    unpack(in_blocks(in_pod(run, names)), names, tmp_path / "here")
    copies = [path for path in tmp_path.glob("here/**/*") if path.is_file()]
    assert sorted(path.name for path in copies) == ["model", "second"]
    assert {path.read_bytes() for path in copies} == {bytes(3 << 20)}


@given(st.integers(0, 3 << 20))
@settings(max_examples=20, deadline=None, derandomize=True)
def test_a_stream_that_is_cut_leaves_no_incomplete_file(size: int) -> None:
    sent = io.BytesIO()
    with tarfile.open(fileobj=sent, mode="w|") as archive:
        member = tarfile.TarInfo("train/model")
        member.size = 3 << 20
        archive.addfile(member, io.BytesIO(bytes(3 << 20)))
    with tempfile.TemporaryDirectory() as folder:
        with pytest.raises(StorageError, match="cut short"):
            unpack(in_blocks(sent.getvalue()[:size]), ["train/model"], Path(folder))
        assert not Path(folder, "train/model").exists()


def test_only_requested_files_are_written(tmp_path: Path) -> None:
    sent = io.BytesIO()
    with tarfile.open(fileobj=sent, mode="w|") as archive:
        outside, link = tarfile.TarInfo("../outside"), tarfile.TarInfo("train/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
        archive.addfile(outside)
        archive.addfile(link)
    unpack(in_blocks(sent.getvalue()), ["train/link"], tmp_path / "here" / "deep")
    assert list(tmp_path.rglob("*")) == []
