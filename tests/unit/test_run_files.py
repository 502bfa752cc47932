"""A run's files in a folder, and from the tar stream of a pod."""

import io
import json
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
from kfp_ddp.client.run_files import StoredFiles, unpack
from kfp_ddp.core.errors import StorageError


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
