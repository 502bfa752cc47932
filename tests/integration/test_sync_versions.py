"""Versions on a claim: what a new one keeps, what the options choose, which ones are removed."""

import os
import time
from pathlib import Path

import pytest

from kfp_ddp.components.data_sync import report
from kfp_ddp.training.errors import InputError
from tests.gcs_server import Bucket, bucket
from tests.sync_runs import content, damage, fill, run

__all__ = ["bucket"]


def test_guard_refuses_to_lose_most_of_a_dataset(bucket: Bucket, tmp_path: Path) -> None:
    objects = fill(bucket)
    first = run(tmp_path)
    for name in list(objects)[:30]:
        del bucket.objects[f"ds/{name}"]
    with pytest.raises(InputError, match=r"lacks 30 of the 40 files .* max_delete to 1"):
        run(tmp_path)
    assert (tmp_path / "current").resolve() == first.path
    assert len(content(run(tmp_path, max_delete=1).path)) == 10


def test_without_delete_the_new_version_keeps_what_the_source_lost(
    bucket: Bucket, tmp_path: Path
) -> None:
    objects = fill(bucket)
    run(tmp_path)
    del bucket.objects["ds/train/c0/0000.png"]
    bucket.put("ds/new", b"new")
    result = run(tmp_path, delete=False)
    assert content(result.path) == objects | {"new": b"new"}
    assert run(tmp_path, delete=False).unchanged


def test_without_delete_a_touched_file_is_kept_and_a_lost_one_named(
    bucket: Bucket, tmp_path: Path
) -> None:
    objects = fill(bucket)
    first = run(tmp_path).path
    for name in ("train/c0/0000.png", "train/c1/0001.png"):
        del bucket.objects[f"ds/{name}"]
    os.utime(first / "train/c0/0000.png")
    bucket.put("ds/new", b"new")
    second = run(tmp_path, delete=False).path
    assert content(second) == objects | {"new": b"new"}
    damage(second / "train/c1/0001.png")
    (second / "train/c0/0000.png").unlink()
    bucket.put("ds/newer", b"newer")
    lost = r"1 files that gs://bucket/ds no longer has .*'train/c0/0000.png' first.*delete on"
    with pytest.raises(InputError, match=lost):
        run(tmp_path, delete=False)
    with pytest.raises(InputError, match=lost.replace("1", "2", 1)):
        run(tmp_path, delete=False, verify="full")
    del bucket.objects["ds/newer"]
    with pytest.raises(InputError, match=lost.replace("1", "2", 1)):
        run(tmp_path, delete=False, verify="full")
    assert (tmp_path / "current").resolve() == second
    assert len(content(run(tmp_path).path)) == 39


def test_old_versions_are_collected(bucket: Bucket, tmp_path: Path) -> None:
    fill(bucket, 4)
    seen = []
    for at in range(4):
        bucket.put("ds/extra", bytes([at]))
        seen.append(run(tmp_path, keep_versions=2).digest[:12])
    assert {path.name for path in (tmp_path / "versions").iterdir()} == set(seen[-2:])
    bucket.put("ds/extra", bytes([0]))
    run(tmp_path, keep_versions=2, dataset="other")
    assert len(list((tmp_path / "versions").iterdir())) == 3


@pytest.mark.parametrize("mirror", [False, True])
def test_dry_run_writes_nothing_and_tells_all(bucket: Bucket, tmp_path: Path, mirror: bool) -> None:
    fill(bucket, 4)
    target = tmp_path / "target"
    run(target, mirror=mirror, dry_run=True)
    assert not target.exists()
    run(target, mirror=mirror)
    bucket.put("ds/train/c0/0000.png", b"new")
    bucket.put("ds/added", b"added")
    del bucket.objects["ds/train/c1/0001.png"]
    before = sorted(target.rglob("*"))
    result = run(target, mirror=mirror, dry_run=True)
    assert report.table(result) == [
        "action            bytes  name",
        "add                   5  added",
        "replace               3  train/c0/0000.png",
        "delete                   train/c1/0001.png",
        "1 to add, 1 to replace, 1 to delete, 2 unchanged",
    ]
    assert sorted(target.rglob("*")) == before
    assert "dry run, nothing written" in report.line(result)


def test_include_and_exclude(bucket: Bucket, tmp_path: Path) -> None:
    for name in ("a/x.png", "a/b/y.png", "a/b/z.txt", "c/w.png"):
        bucket.put(f"ds/{name}", name.encode())

    def names(**globs: tuple[str, ...]) -> list[str]:
        return run(tmp_path, dry_run=True, **globs).names.listing.names

    assert names(include=("*.png",)) == ["a/b/y.png", "a/x.png", "c/w.png"]
    assert names(include=("a/*",)) == ["a/x.png"]
    assert names(include=("a/**",)) == ["a/b/y.png", "a/b/z.txt", "a/x.png"]
    assert names(exclude=("**/b/**", "w.?ng")) == ["a/x.png"]
    with pytest.raises(InputError, match="include and exclude leave nothing"):
        names(include=("*.gif",))


def test_bandwidth_limit_slows_down(bucket: Bucket, tmp_path: Path) -> None:
    fill(bucket, 40, 10_000)
    began = time.monotonic()
    run(tmp_path, bandwidth=1e6)
    assert time.monotonic() - began >= 0.38, "400 kB at 1 MB/s"
