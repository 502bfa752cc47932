"""A target that is full, or without write permission."""

import os
import subprocess
from pathlib import Path

import pytest

from kfp_ddp.core.errors import StorageError
from kfp_ddp.datasets import checks
from kfp_ddp.datasets.transfer import SMALL
from tests.gcs_server import Bucket
from tests.sync_runs import another_user, content, fill, run, small_disk


def test_archive_needs_no_inodes_but_room_for_all_of_it(bucket: Bucket, tmp_path: Path) -> None:
    fill(bucket)
    with small_disk(tmp_path / "disk", "size=260k,nr_inodes=30") as disk:
        first = run(disk, pack="tar").path
        bucket.put("ds/new", b"new")
        bucket.gets.clear()
        with pytest.raises(StorageError, match=r"free and 120.0 kB are to come"):
            run(disk, pack="tar")
        assert "120.0 kB are to come" in run(disk, pack="tar", dry_run=True).refusal
        assert bucket.gets == []
        assert (disk / "current").resolve() == first


@pytest.mark.parametrize(
    ("options", "count", "large"),
    [("size=64k", 40, 0), ("size=8m,nr_inodes=30", 40, 0), ("size=64k", 0, SMALL + 1)],
)
def test_disk_that_fills_up_meanwhile_is_one_line_and_can_be_resumed(
    bucket: Bucket,
    tmp_path: Path,
    options: str,
    count: int,
    large: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    objects = fill(bucket, count)
    if large:
        objects["large"] = bytes(large)
        bucket.put("ds/large", objects["large"])
    monkeypatch.setattr(checks, "check_room", lambda *_: None)  # another writer took the room
    with small_disk(tmp_path / "disk", options) as disk:
        with pytest.raises(StorageError, match=r"cannot write .*No space left.*free space"):
            run(disk)
        assert not (disk / "current").exists()
        subprocess.run(["mount", "-o", "remount,size=8m,nr_inodes=500", str(disk)], check=True)
        assert content(run(disk).path) == objects


@pytest.mark.parametrize("mirror", [False, True])
def test_disk_is_one_line_whatever_does_not_fit(
    bucket: Bucket, tmp_path: Path, mirror: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one inode more each time, another step of the protocol is the one that fails."""
    objects = fill(bucket, 4)
    monkeypatch.setattr(checks, "check_room", lambda *_: None)
    refused = set()
    for inodes in range(2, 40):
        folder = tmp_path / str(inodes)
        with small_disk(folder, f"size=8m,nr_inodes={inodes}") as disk:
            try:
                run(disk, mirror=mirror)
            except StorageError as error:
                name = Path(str(error).split()[2]).name
                refused.add("a file" if name.endswith(".png") else name)  # whichever came first
            else:
                assert content(disk if mirror else disk / "current") == objects
                break
            subprocess.run(["mount", "-o", "remount,nr_inodes=100", str(disk)], check=True)
            assert content(run(disk, mirror=mirror).path) == objects
    wanted = {"building", "journal", "a file"}
    wanted |= {"manifest.jsonl"} if mirror else {"_MANIFEST.jsonl", "_SUCCESS"}
    assert wanted <= refused


def test_modes_do_not_depend_on_the_umask(bucket: Bucket, tmp_path: Path) -> None:
    fill(bucket, 4)
    mask = os.umask(0o077)
    try:
        version = run(tmp_path).path
    finally:
        os.umask(mask)
    modes = {path.stat().st_mode & 0o777 for path in version.rglob("*") if path.is_file()}
    assert modes == {0o644}
    folders = [version, *(path for path in version.rglob("*") if path.is_dir())]
    assert {path.stat().st_mode & 0o777 for path in folders} == {0o755}


def test_target_without_rights_is_one_line(bucket: Bucket, tmp_path: Path) -> None:
    fill(bucket, 4)
    run(tmp_path / "imports-everything")
    (tmp_path / "target").mkdir(mode=0o555)
    with (
        another_user(tmp_path),
        pytest.raises(
            StorageError, match=r"^cannot write .*as uid 65534.*\(on a claim: fsGroup\)$"
        ),
    ):
        run(Path("target"))
