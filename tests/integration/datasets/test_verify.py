"""Damage on the disk is found and mended as `verify` asks, also in packed versions."""

import os
import tarfile
from pathlib import Path

import pytest

from kfp_ddp.core.errors import InputError
from kfp_ddp.datasets import build, disk
from kfp_ddp.datasets.pack import TarStage
from kfp_ddp.storage.listing import Listing
from tests.gcs_server import Bucket
from tests.sync_runs import content, damage, fill, run, unpacked


@pytest.mark.parametrize("pack", ["none", "tar"])
def test_verify_finds_and_mends_damage(bucket: Bucket, tmp_path: Path, pack: str) -> None:
    objects = fill(bucket)
    first = run(tmp_path, pack=pack)
    assert run(tmp_path, pack=pack, verify="full").unchanged
    victim = next(first.path.rglob("*.tar" if pack == "tar" else "0007.png"))
    damage(victim)
    assert run(tmp_path, pack=pack, verify="quick").unchanged, "same size and time: not seen"
    mended = run(tmp_path, pack=pack, verify="full")
    assert mended.repaired == 1
    assert unpacked(mended.path, pack) == objects
    assert run(tmp_path, pack=pack, verify="full").unchanged


def test_packed_version_stays_until_another_is_whole(bucket: Bucket, tmp_path: Path) -> None:
    objects = fill(bucket)
    first = run(tmp_path, pack="tar")
    damage(next(first.path.glob("*.tar")))
    for name in objects:
        bucket.fault(f"ds/{name}", "403")
    with pytest.raises(InputError, match="403"):
        run(tmp_path, pack="tar", verify="full")
    assert (tmp_path / "current").resolve() == first.path
    assert len(unpacked(first.path, "tar")) == 40
    bucket.faults.clear()
    bucket.gets.clear()
    mended = run(tmp_path, pack="tar", verify="full")
    assert len(bucket.gets) == 1, "the sound members come from the damaged archive"
    assert unpacked(mended.path, "tar") == objects


def test_mended_files_are_on_disk_before_they_stand_in_the_version(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = fill(bucket)
    victim = run(tmp_path).path / "train/c3/0007.png"
    victim.write_bytes(b"damaged")
    flushed: list[bytes] = []
    flush = disk.flush_filesystem

    def note(path: Path) -> None:  # a loss of power cannot be had on demand
        flush(path)
        flushed.append(victim.read_bytes())

    monkeypatch.setattr(build, "flush_filesystem", note)
    run(tmp_path, verify="quick")
    assert flushed == [b"damaged", objects["train/c3/0007.png"]]


def test_verify_quick_sees_another_size_or_time_or_absence(bucket: Bucket, tmp_path: Path) -> None:
    objects = fill(bucket)
    first = run(tmp_path)
    (first.path / "train/c0/0000.png").unlink()
    (first.path / "train/c1/0001.png").write_bytes(b"short")
    (first.path / "train/c2/0002.png").write_bytes(b"x" * 3000)
    os.utime(first.path / "train/c3/0003.png")  # only touched: read, and found good
    mended = run(tmp_path, verify="quick")
    assert (mended.repaired, mended.downloaded) == (3, 3)
    assert content(mended.path) == objects


@pytest.mark.parametrize("verify", ["list", "full"])
def test_damage_in_last_version_is_not_linked(bucket: Bucket, tmp_path: Path, verify: str) -> None:
    objects = fill(bucket)
    victim = run(tmp_path).path / "train/c3/0007.png"
    damage(victim)
    if verify == "list":
        os.utime(victim)
    bucket.put("ds/new", b"new")
    result = run(tmp_path, verify=verify)
    assert (result.downloaded, result.linked) == (2, 39)
    assert content(result.path) == objects | {"new": b"new"}


@pytest.mark.parametrize("place", ["name", "end", "cut"])
def test_archive_is_checked_as_a_whole(bucket: Bucket, tmp_path: Path, place: str) -> None:
    objects = fill(bucket)
    path = next(run(tmp_path, pack="tar").path.glob("*.tar"))
    data = bytearray(path.read_bytes())
    if place == "cut":
        del data[-5000:]
    else:
        data[-1 if place == "end" else 10] ^= 1
    path.write_bytes(data)
    bucket.gets.clear()
    mended = run(tmp_path, pack="tar", verify="quick" if place == "cut" else "full")
    assert mended.repaired >= 1
    assert len(bucket.gets) == (2 if place == "cut" else 0)
    assert unpacked(mended.path, "tar") == objects
    assert run(tmp_path, pack="tar", verify="full").unchanged


def test_packed_version_is_deterministic_and_reuses_files(bucket: Bucket, tmp_path: Path) -> None:
    objects = fill(bucket)
    long = "train/" + "d" * 120 + "/ü.png"
    bucket.put(f"ds/{long}", b"long")
    first = run(tmp_path / "a", pack="tar")
    second = run(tmp_path / "b", pack="tar")
    assert content(first.path) == content(second.path)
    assert first.digest != run(tmp_path / "a", dry_run=True).digest
    bucket.put("ds/aaa", b"new")
    bucket.gets.clear()
    third = run(tmp_path / "a", pack="tar")
    assert bucket.gets == ["ds/aaa"]
    assert unpacked(third.path, "tar") == objects | {long: b"long", "aaa": b"new"}


def test_the_header_of_a_large_member_has_room(tmp_path: Path) -> None:
    listing = Listing()
    listing.add("a", 512, 0)
    listing.add("b", 8**11, 0)  # in a sparse file
    stage = TarStage(tmp_path / "stage", listing)
    stage.open()
    stage.put(0, b"a" * 512, 0)
    stage.finish(1, stage.begin(1)[0], 0)
    stage.close()
    with tarfile.open(stage.path(0)) as archive:
        assert [(one.name, one.size) for one in archive] == [("a", 512), ("b", 8**11)]
        assert (file := archive.extractfile("a"))
        assert file.read() == b"a" * 512


def test_archives_end_at_their_size(bucket: Bucket, tmp_path: Path) -> None:
    fill(bucket)
    listing = run(tmp_path, dry_run=True).names.listing
    stage = TarStage(tmp_path / "stage", listing, shard_bytes=20_000)
    assert {stage.member_offset(i)[0] for i in range(40)} == {f"shard-{i:05}.tar" for i in range(7)}
