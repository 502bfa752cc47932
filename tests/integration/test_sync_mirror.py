"""A plain folder as the target, as the command line writes it."""

from pathlib import Path

import pytest

from kfp_ddp.base.errors import StorageError
from tests.gcs_server import Bucket
from tests.sync_runs import content, fill, run


def test_mirror_deletes_extras_only_when_told(bucket: Bucket, tmp_path: Path) -> None:
    objects = fill(bucket)
    (tmp_path / "old/deep").mkdir(parents=True)
    (tmp_path / "old/deep/file").write_text("extra")
    run(tmp_path, mirror=True, delete=False)
    assert content(tmp_path) == objects | {"old/deep/file": b"extra"}
    assert run(tmp_path, mirror=True, delete=False).unchanged
    result = run(tmp_path, mirror=True)
    assert result.deleted == 1
    assert content(tmp_path) == objects
    assert not (tmp_path / "old").exists()


def test_mirror_adopts_equal_files_and_replaces_others(bucket: Bucket, tmp_path: Path) -> None:
    objects = fill(bucket)
    for at, name in enumerate(list(objects)[:10]):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(objects[name] if at % 2 else b"x" * 3000)
    result = run(tmp_path, mirror=True, verify="quick")
    assert (result.downloaded, len(result.changes.same)) == (35, 5)
    assert content(tmp_path) == objects


def test_failed_mirror_changes_nothing(bucket: Bucket, tmp_path: Path) -> None:
    objects = fill(bucket)
    run(tmp_path, mirror=True)
    for at in range(5):
        bucket.put(f"ds/train/c0/{at * 4:04}.png", b"changed")
    bucket.fault("ds/train/c0/0000.png", *["503"] * 50)
    with pytest.raises(StorageError):
        run(tmp_path, mirror=True, verify="full")
    assert content(tmp_path) == objects
