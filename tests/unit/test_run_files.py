"""A run's files: what a folder holds, and what comes out of a pod's stream."""

import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kfp_ddp.client import pod_program
from kfp_ddp.client.claim_files import unpack
from kfp_ddp.client.run_files import StoredFiles
from kfp_ddp.core.errors import StorageError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with a task, something hidden and a link that leads out of it."""
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
    """What the pod's program answers."""
    asked = json.dumps({"root": str(root), "names": names}).encode() + b"\n"
    program = [sys.executable, "-c", Path(pod_program.__file__).read_text()]
    return subprocess.run(program, input=asked, capture_output=True, check=True).stdout


def in_blocks(data: bytes, size: int = 1000) -> Iterator[bytes]:
    """The same in small pieces."""
    yield from (data[at : at + size] for at in range(0, len(data), size))


def test_a_folder_and_a_pod_list_the_same_plain_files(run: Path) -> None:
    listed = {"train/metrics.jsonl": 3, "train/bundle/model": 3 << 20}
    assert StoredFiles(str(run)).sizes() == listed
    assert json.loads(in_pod(run, None)) == listed


def test_a_run_that_left_nothing_has_no_files(tmp_path: Path) -> None:
    assert StoredFiles(str(tmp_path / "none")).sizes() == {}
    assert json.loads(in_pod(tmp_path / "none", None)) == {}


def test_what_a_pod_sends_comes_out_whole_and_what_is_gone_is_passed_over(
    run: Path, tmp_path: Path
) -> None:
    names = ["train/bundle/model", "train/gone", "train/metrics.jsonl"]
    unpack(in_blocks(in_pod(run, names)), names, tmp_path / "here")
    assert (tmp_path / "here/train/bundle/model").read_bytes() == bytes(3 << 20)
    assert {p.name for p in tmp_path.glob("here/train/**/*")} == {
        *("bundle", "model", "metrics.jsonl")
    }


def test_a_file_of_two_names_comes_under_both(run: Path, tmp_path: Path) -> None:
    names = ["train/bundle/model", "train/bundle/served"]
    (run / names[1]).hardlink_to(run / names[0])
    unpack(in_blocks(in_pod(run, names)), names, tmp_path / "here")
    assert [(tmp_path / "here" / name).stat().st_size for name in names] == [3 << 20] * 2


def test_a_stream_that_is_cut_leaves_no_file_under_its_name(run: Path, tmp_path: Path) -> None:
    names = ["train/bundle/model"]
    cut = in_pod(run, names)[: 1 << 20]
    with pytest.raises(StorageError, match="cut short"):
        unpack(in_blocks(cut), names, tmp_path / "here")
    assert not (tmp_path / "here/train/bundle/model").exists()


def test_a_stream_writes_nothing_that_was_not_asked_for(tmp_path: Path) -> None:
    sent = io.BytesIO()
    with tarfile.open(fileobj=sent, mode="w|") as archive:
        outside, link = tarfile.TarInfo("../outside"), tarfile.TarInfo("train/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
        archive.addfile(outside)
        archive.addfile(link)
    unpack(in_blocks(sent.getvalue()), ["train/link"], tmp_path / "here" / "deep")
    assert list(tmp_path.rglob("*")) == []


def test_no_link_is_sent(run: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(in_pod(run, ["train/link"]))) as archive:
        assert archive.getnames() == []
