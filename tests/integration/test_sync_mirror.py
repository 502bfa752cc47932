"""Mirrors of folders and buckets, and names of objects that are invalid as files."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.datasets import mirror, report
from kfp_ddp.datasets.options import SyncOptions
from kfp_ddp.datasets.sync import sync
from tests.gcs_server import Bucket
from tests.sync_runs import another_user, content, fill, pretend_folding, run, write

HOSTILE = (
    "../evil.txt", "x/../../../evil2.txt", "/abs.txt", "a//c", "x/./y", "x/../z", "nul\0x",
    "new\nline", "L" * 1000, "deep/" + "n" * 300, "..", ".", "_SUCCESS/x", ".kfsync/lock",
    "_MANIFEST.jsonl/x", "dir-with-content/", "both", "csi\x9b2J", "\u202egpj.exe",
)  # fmt: skip
HARMLESS = ("back\\slash", "..\\win", "con", "trail ", "-rf", "~root", "é.txt", "e\u0301.txt",
            "Case.txt", "case.txt", "both/b", "empty/", "%2E%2E/x", "a..b/...c",
            "_SUCCESS.tmp", "_MANIFEST.jsonl.tmp", "manifest.jsonl.tmp", "journal", "current",
            "shard-00000.tar", ".kfsync-probe-\u00e9a", ".kfsync-probe-e\u0301a", "versions/x",
)  # fmt: skip


def test_mirror_deletes_extras_only_when_told(bucket: Bucket, tmp_path: Path) -> None:
    objects = fill(bucket)
    write(tmp_path, {"old/deep/file": b"extra"})
    run(tmp_path, mirror=True, delete=False)
    assert content(tmp_path) == objects | {"old/deep/file": b"extra"}
    assert run(tmp_path, mirror=True, delete=False).unchanged
    assert run(tmp_path, mirror=True).changes.removed == ["old/deep/file"]
    assert content(tmp_path) == objects
    assert not (tmp_path / "old").exists()


@pytest.mark.parametrize("folds", [False, True])
def test_folded_names_are_not_deleted(bucket: Bucket, tmp_path: Path, folds: bool) -> None:
    """On such a disk the two names are one file, which was just written."""
    bucket.put("ds/cat.jpg", b"new")
    bucket.put("ds/dogs/1.jpg", b"new")
    there = ("Cat.jpg", "Dogs/1.jpg", "old.jpg")
    write(tmp_path, dict.fromkeys(there, b"old"))
    if folds:
        pretend_folding(tmp_path)
    result = run(tmp_path, mirror=True, max_delete=1)
    assert result.changes.removed == (["old.jpg"] if folds else [*there])


def test_mirror_adopts_equal_files_and_replaces_others(bucket: Bucket, tmp_path: Path) -> None:
    objects = fill(bucket)
    ten = enumerate(list(objects)[:10])
    write(tmp_path, {name: objects[name] if at % 2 else b"x" * 3000 for at, name in ten})
    result = run(tmp_path, mirror=True, verify="quick")
    assert (result.downloaded, len(result.changes.same)) == (35, 5)
    assert content(tmp_path) == objects


def test_failed_mirror_changes_nothing_and_a_killed_one_is_undone(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = fill(bucket)
    run(tmp_path, mirror=True)
    for at in range(5):
        bucket.put(f"ds/train/c0/{at * 4:04}.png", b"changed")
    bucket.fault("ds/train/c0/0000.png", *["503"] * 50)
    with pytest.raises(StorageError):
        run(tmp_path, mirror=True, verify="full")
    assert content(tmp_path) == objects
    bucket.faults.clear()
    monkeypatch.setattr(mirror._Plan, "delete_extras", Mock(side_effect=[KeyboardInterrupt, None]))
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, mirror=True)
    bucket.put_all(objects)
    run(tmp_path, mirror=True)
    assert content(tmp_path) == objects


@pytest.mark.parametrize(
    ("globs", "gone"),
    [
        ({"include": ("*.jpg",)}, {"old.jpg", "a/old.jpg"}),
        ({"exclude": ("*.csv", "keep/**")}, {"old.jpg", "a/old.jpg", "old.txt"}),
        ({"include": ("a/**",)}, {"a/old.jpg"}),
        ({}, {"old.jpg", "a/old.jpg", "old.txt", "labels.csv", "keep/x", "keep/deep/y"}),
    ],
)
def test_filters(bucket: Bucket, tmp_path: Path, globs: dict[str, Any], gone: set[str]) -> None:
    """The share that max_delete guards is of what the filter lets pass, too."""
    for name in ("1.jpg", "a/2.jpg", "labels.csv"):
        bucket.put(f"ds/{name}", b"new")
    there = {"old.jpg", "a/old.jpg", "old.txt", "labels.csv", "keep/x", "keep/deep/y"}
    write(tmp_path, dict.fromkeys(there, b"old"))
    result = run(tmp_path, mirror=True, max_delete=1, **globs)
    assert set(result.changes.removed) == gone - {"labels.csv"}
    assert there - set(content(tmp_path)) == gone - {"labels.csv"}


def test_lost_found_and_what_is_excluded_stay_closed(bucket: Bucket, tmp_path: Path) -> None:
    objects = fill(bucket, 4)
    target = tmp_path / "target"
    write(target, dict.fromkeys(("lost+found/x", "private/x"), b"not ours"))
    for name in ("lost+found", "private"):
        (target / name).chmod(0o700)
    run(tmp_path / "imports-everything")
    os.chown(target, 65534, -1)
    with another_user(tmp_path):
        with pytest.raises(StorageError, match=r"^cannot read target/private as uid 65534: Perm.*"):
            run(Path("target"), mirror=True)
        run(Path("target"), mirror=True, exclude=("private/**",))
        assert not run(Path("target"), mirror=True, delete=False).changes.removed
    assert content(target) == objects | {"lost+found/x": b"not ours", "private/x": b"not ours"}


@pytest.mark.parametrize(
    ("source", "target", "mirror", "refused"),
    [
        *(("t/incoming", "t", True, True), ("t", "t/backup", True, True), ("t", "t", True, True)),
        *(("link", "t/backup", True, True), ("t/incoming", "link", True, True)),
        *(("t/incoming", "t", False, False), ("t/versions", "t", False, True)),
        ("t", "tt", True, False),
    ],
)
def test_overlapping(tmp_path: Path, source: str, target: str, mirror: bool, refused: bool) -> None:
    write(tmp_path, dict.fromkeys(("t/incoming/1", "t/versions/2", "t/x/3"), b"x"))
    (tmp_path / "link").symlink_to(tmp_path / "t")
    before = content(tmp_path)
    options = SyncOptions(mirror=mirror, delete=True, max_delete=1)
    for prefix in ("", "file://"):
        if not refused:
            sync(f"{prefix}{tmp_path}/{source}", tmp_path / target, options)
            continue
        with pytest.raises(InputError, match=r"contain one another; give a target beside"):
            sync(f"{prefix}{tmp_path}/{source}", tmp_path / target, options)
        assert content(tmp_path) == before
        assert not list(tmp_path.rglob(".kfsync"))


def test_name_on_the_disk_cannot_draw_on_the_terminal(bucket: Bucket, tmp_path: Path) -> None:
    fill(bucket, 4)
    (tmp_path / "a\x1b[2J\n\x9b\u202ex`").write_bytes(b"extra")
    result = run(tmp_path, mirror=True, max_delete=1, dry_run=True)
    for text in ("".join(report.table(result)), report.markdown(result).replace("\n", "")):
        assert text.isprintable()


@pytest.fixture
def target(bucket: Bucket, tmp_path: Path) -> Iterator[Path]:
    """Yield a target for a bucket of hostile names; no file is left outside of it."""
    for name in HOSTILE + HARMLESS:
        bucket.put(f"ds/{name}", b"" if name == "empty/" else f"content of {name}".encode())
    target = tmp_path / "deep" / "target"
    target.mkdir(parents=True)
    yield target
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize("mirror", [False, True])
def test_hostile_names_follow_their_policy(bucket: Bucket, target: Path, mirror: bool) -> None:
    with pytest.raises(InputError, match=f"^{len(HOSTILE)} object names cannot be files: "):
        run(target, mirror=mirror)
    assert bucket.gets == []
    result = run(target, mirror=mirror, hostile_names="skip")
    assert {name for name, _ in result.names.skipped} == set(HOSTILE)
    files = {name: f"content of {name}".encode() for name in HARMLESS if name != "empty/"}
    assert content(result.path) == files
    assert (result.path / "empty").is_dir()
    result = run(target, mirror=mirror, hostile_names="encode")
    assert set(result.names.encoded) == set(HOSTILE)
    files |= {new: f"content of {name}".encode() for name, new in result.names.encoded.items()}
    assert content(result.path) == files
    assert run(target, mirror=mirror, hostile_names="encode").unchanged
    without = run(target, mirror=mirror, hostile_names="encode", exclude=("/new%0Aline", "/nul\0x"))
    left_out = {result.names.encoded[name] for name in ("new\nline", "nul\0x")}
    assert {*result.names.listing.names} - {*without.names.listing.names} == left_out
