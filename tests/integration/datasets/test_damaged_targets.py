"""Targets that are damaged, full or without write permission."""

import json
import os
import random
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from kfp_ddp.core.errors import KfpDdpError, StorageError
from kfp_ddp.datasets import checks
from kfp_ddp.datasets.options import SyncOptions
from kfp_ddp.datasets.report import Result
from kfp_ddp.datasets.sync import sync
from kfp_ddp.datasets.transfer import SMALL
from tests.gcs_server import Bucket
from tests.sync_runs import OWN, another_user, content, fill, run, small_disk, unpacked, write

OBJECTS = {name: name.encode() * 50 for name in ("a/x", "a/y", "a/deep/z", "b/x", "top", "empty")}
OBJECTS |= {"b/large": bytes((1 << 20) + 1), "empty": b""}
PLANTED = (
    *(".kfsync", "versions", "current", ".kfsync/lock", ".kfsync/handing-out", ".kfsync/leases"),
    *(".kfsync/building", ".kfsync/trash", ".kfsync/manifest.jsonl"),
    *(".kfsync/building/{d}", ".kfsync/building/{d}/tree", ".kfsync/building/{d}/parts"),
    *(".kfsync/building/{d}/journal", ".kfsync/building/{d}/tree/a", ".kfsync/leases/{d}"),
    *(".kfsync/building/{d}/_MANIFEST.jsonl", ".kfsync/building/{d}/_SUCCESS"),
    *("versions/{d}", "versions/{d}/_SUCCESS", "versions/{d}/_MANIFEST.jsonl"),
    *("versions/{d}/_MANIFEST.jsonl.tmp", "versions/{d}/_SUCCESS.tmp"),
    *(".kfsync/leases/{d}/run.left", ".kfsync/.kfsync-probe-\u00e9a"),
    *("versions/{d}/shard-00000.tar", ".kfsync/building/{d}/tree/shard-00000.tar"),
)
ODD: tuple[object, ...] = (
    *(None, True, -1, 1 << 70, 1.5, "", "x", [], {}, [[]], "../../other/mine", "/etc/passwd"),
    *("a/x", "\x00", "zz", "-1", "f" * 40, "\ud800", 0, "shard-00000.tar", "../outside"),
)
FUZZ = dict[str, Any](deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def options_of(kind: str) -> dict[str, Any]:
    """Options of a sync into versions of files or archives, which removes what it may."""
    limits = {"max_delete": 1, "keep_versions": 1, "keep_hours": 0}
    return {"pack": "tar" if kind == "tar" else "none", **limits}


def synced(source: Path, target: Path, options: dict[str, Any]) -> Result | None:
    """Return the result of a sync, or None after a refusal of one line."""
    try:
        return sync(str(source), target, SyncOptions(**options), run_id="run")
    except KfpDdpError as refused:
        event("refused")
        line = str(refused)
    assert line.isprintable()
    return None


def copy_of_user(folder: Path, like: Path) -> None:
    """Create files of a user under the names that the target has."""
    shutil.copytree(like, folder, symlinks=True)
    for path in list(folder.rglob("*")):
        if path.is_symlink():
            path.unlink()
    files = [path for path in folder.rglob("*") if path.is_file()]
    for path in [*files, folder / "run-0.left"]:
        path.write_bytes(b"mine")
        os.utime(path, ns=(10**18, 10**18))


def state(folder: Path) -> dict[str, tuple[object, ...]]:
    """Return all that a write or a link could change in a folder."""
    states: dict[str, tuple[object, ...]] = {}
    for path in [folder, *folder.rglob("*")]:
        seen = path.lstat()
        data = path.read_bytes() if path.is_file() else b""
        times = (seen.st_mtime_ns, seen.st_ctime_ns, seen.st_mode, seen.st_nlink)
        states[str(path.relative_to(folder))] = (*times, seen.st_ino, data)
    return states


def plant(target: Path, other: Path, choose: random.Random, digests: list[str]) -> None:
    """Replace a file or folder of the target by a link or a pipe."""
    present = sorted(str(path.relative_to(target)) for path in target.rglob("*"))
    planned = [name.replace("{d}", digest) for name in PLANTED for digest in digests]
    name = choose.choice([*present, *planned, *planned])
    path = target / name
    above = [parent for parent in path.parents if parent.is_relative_to(target)]
    if any(parent.is_symlink() or (parent.exists() and not parent.is_dir()) for parent in above):
        return
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    same = other / name
    links = [None, other, other / "top", other / "run-0.left", other / "none", same, same]
    to = choose.choice(links)
    if to is None:
        os.mkfifo(path)
    else:
        path.symlink_to(to)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["versions", "tar"])
@given(choose=st.randoms(use_true_random=False))
@settings(max_examples=50, **FUZZ)
def test_planted_links_lead_nowhere(tmp_path: Path, kind: str, choose: random.Random) -> None:
    base = Path(tempfile.mkdtemp(dir=tmp_path))
    source, target, other = base / "source", base / "target", base / "other"
    write(source, OBJECTS)
    options = options_of(kind)
    first = sync(str(source), target, SyncOptions(**options), run_id="run")
    write(source, {"a/y": b"changed", "new/w": b"new"})
    second = sync(str(source), target, SyncOptions(**options, dry_run=True))
    if choose.random() < 0.5:
        write(source, OBJECTS)
        shutil.rmtree(source / "new")
    options |= {"verify": choose.choice(["list", "quick", "full"])}
    copy_of_user(other, target)
    for _ in range(choose.randint(1, 3)):
        plant(target, other, choose, [first.digest[:12], second.digest[:12]])
    before = state(other)
    result = synced(source, target, options)
    if result and options["verify"] == "full" and kind != "tar":
        files = content(result.path)
        expected = content(source)
        assert {name: files.get(name) for name in expected} == expected
        assert not any((result.path / name).is_symlink() for name in expected)
    assert state(other) == before
    shutil.rmtree(base)


def damaged(data: bytes, choose: random.Random) -> bytes:
    """Return the content of a file with a fault."""
    at = choose.randrange(len(data) + 1)
    match choose.randrange(6):
        case 0:
            return data[:at]
        case 1 if data:
            flipped = bytearray(data)
            flipped[at - 1] ^= 1 << choose.randrange(8)
            return bytes(flipped)
        case 2:
            return data[:at] + choose.randbytes(20) + data[at:]
        case 3:
            return b"[" * 100_000 + b"\n" + data
    lines = data.split(b"\n")
    at = choose.randrange(len(lines))
    lines[at] = forged(lines[at], choose)
    return b"\n".join(lines)


def forged(line: bytes, choose: random.Random) -> bytes:
    """Return a line of JSON with an odd value."""
    odd = choose.choice(ODD)
    try:
        document: Any = json.loads(line)
    except ValueError:
        return json.dumps(odd).encode()
    if isinstance(document, dict) and document:
        document[choose.choice(list(document))] = odd
    elif isinstance(document, list) and document:
        document[choose.randrange(len(document))] = odd
        document += choose.choice([[], [odd]])
    return json.dumps(document).encode()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["versions", "tar"])
@given(choose=st.randoms(use_true_random=False))
@settings(max_examples=50, **FUZZ)
def test_damaged_metadata_harms_nothing(tmp_path: Path, kind: str, choose: random.Random) -> None:
    base = Path(tempfile.mkdtemp(dir=tmp_path))
    source, target = base / "source", base / "target"
    objects = {name: data for name, data in OBJECTS.items() if len(data) < 1000}
    write(source, objects)
    options = options_of(kind)
    sync(str(source), target, SyncOptions(**options), run_id="run")
    ours = [*target.glob("versions/*/_*"), *target.glob(".kfsync/lock")]
    ours += target.glob(".kfsync/leases/*/*")
    for path in choose.sample(sorted(ours), choose.randint(1, 2)):
        path.write_bytes(damaged(path.read_bytes(), choose))
    if choose.random() < 0.5:
        objects["a/y"] = b"new"
        write(source, objects)
    options |= {"verify": choose.choice(["list", "quick", "full"])}
    if result := synced(source, target, options):
        files = unpacked(result.path, options["pack"])
        assert files == objects
    shutil.rmtree(base)


def test_archive_needs_no_inodes_but_room_for_all_of_it(bucket: Bucket, tmp_path: Path) -> None:
    fill(bucket)
    with small_disk(tmp_path / "disk", "size=260k,nr_inodes=30") as disk:
        first = run(disk, pack="tar").path
        bucket.put("ds/new", b"new")
        bucket.gets.clear()
        with pytest.raises(StorageError, match=r"free, but 120.0 kB will be written"):
            run(disk, pack="tar")
        assert "120.0 kB will be written" in run(disk, pack="tar", dry_run=True).refusal
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


def test_disk_is_one_line_whatever_does_not_fit(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one inode more each time, another step of the protocol is the one that fails."""
    objects = fill(bucket, 4)
    monkeypatch.setattr(checks, "check_room", lambda *_: None)
    refused = set()
    for inodes in range(2, 40):
        folder = tmp_path / str(inodes)
        with small_disk(folder, f"size=8m,nr_inodes={inodes}") as disk:
            try:
                run(disk)
            except StorageError as error:
                name = Path(str(error).split()[3].rstrip(":")).name
                refused.add("a file" if name.endswith(".png") else name)  # whichever came first
            else:
                assert content(disk / "current") == objects
                break
            subprocess.run(["mount", "-o", "remount,nr_inodes=100", str(disk)], check=True)
            assert content(run(disk).path) == objects
    assert {"building", "journal", "a file", "_MANIFEST.jsonl", "_SUCCESS"} <= refused


@pytest.mark.parametrize("mask", [0o077, 0o022, 0])
def test_modes_ignore_the_umask(bucket: Bucket, tmp_path: Path, mask: int) -> None:
    """Files that versions share are read-only, also where an earlier one is not."""
    target = tmp_path / "target"
    fill(bucket, 4)
    bucket.put("ds/large", bytes(SMALL + 1))
    before = os.umask(mask)
    try:
        (run(target).path / "large").chmod(0o664)
        bucket.put("ds/new", b"new")
        version = run(target).path
    finally:
        os.umask(before)
    modes = {name: (version / name).stat().st_mode & 0o777 for name in content(version)}
    assert set(modes.values()) == {0o444}
    own = [path for path in version.iterdir() if path.name in OWN]
    assert {path.stat().st_mode & 0o777 for path in own} == {0o644}
    folders = [version / "train", *(version / "train").iterdir(), version]
    assert {path.stat().st_mode & 0o777 for path in folders} == {0o755}


def test_target_without_rights_is_one_line(bucket: Bucket, tmp_path: Path) -> None:
    fill(bucket, 4)
    run(tmp_path / "imports-everything")
    (tmp_path / "target").mkdir(mode=0o555)
    with (
        another_user(tmp_path),
        pytest.raises(
            StorageError, match=r"^cannot write .*for uid 65534 \(on a claim: fsGroup\)$"
        ),
    ):
        run(Path("target"))
