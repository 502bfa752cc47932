"""What a sync does to its target: interrupted, raced, full, planted with links, or as asked."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kfp_ddp.components.data_sync import mirror, report
from kfp_ddp.components.data_sync.options import Options, Result
from kfp_ddp.components.data_sync.pace import Retry
from kfp_ddp.components.data_sync.pack import TarStage
from kfp_ddp.components.data_sync.sync import sync
from kfp_ddp.components.data_sync.versions import Store
from kfp_ddp.training.errors import InputError
from tests.gcs_server import Bucket, bucket

__all__ = ["bucket"]

RETRY = Retry(attempts=3, pause=0.01, longest=0.05)
OWN = {"_SUCCESS", "_MANIFEST.jsonl"}


def run(target: Path, **options: object) -> Result:
    return sync("gs://bucket/ds", target, Options(concurrency=4, retry=RETRY, **options))  # type: ignore[arg-type]


def fill(bucket: Bucket, count: int = 40, size: int = 3000) -> dict[str, bytes]:
    random.seed(count)
    objects = {f"train/c{i % 4}/{i:04}.png": random.randbytes(size) for i in range(count)}
    for name, data in objects.items():
        bucket.put(f"ds/{name}", data)
    return objects


def content(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in OWN and ".kfsync" not in path.parts
    }


def start(target: Path, *flags: str) -> "subprocess.Popen[bytes]":
    command = [
        sys.executable,
        "-c",
        "from kfp_ddp.cli import main; main()",
        "sync",
        "gs://bucket/ds",
        str(target),
    ]
    return subprocess.Popen([*command, *flags], stderr=subprocess.DEVNULL)


@pytest.mark.parametrize("pack", ["none", "tar"])
def test_kill_at_random_instants_then_a_run_that_completes(
    bucket: Bucket, tmp_path: Path, pack: str
) -> None:
    objects = fill(bucket, 300)
    bucket.delay = 0.005
    random.seed(3)
    for _ in range(4):
        process = start(tmp_path, "--versions", "--pack", pack, "-j", "4")
        time.sleep(random.uniform(0.2, 0.9))
        process.send_signal(signal.SIGKILL)
        process.wait()
        for version in (tmp_path / "versions").glob("*"):
            assert (version / "_SUCCESS").exists()
    bucket.delay = 0
    result = run(tmp_path, pack=pack)
    assert unpacked(result.path, pack) == objects
    assert result.downloaded + result.resumed == (0 if result.unchanged else 300)


def unpacked(version: Path, pack: str) -> dict[str, bytes]:
    if pack == "none":
        return content(version)
    found = {}
    for path in sorted(version.glob("*.tar")):
        with tarfile.open(path) as archive:
            for member in archive:
                if member.isfile():
                    file = archive.extractfile(member)
                    assert file is not None
                    found[member.name] = file.read()
    return found


def test_interrupted_run_is_continued_by_its_journal(bucket: Bucket, tmp_path: Path) -> None:
    objects = fill(bucket)
    last = "train/c3/0039.png"
    bucket.fault(f"ds/{last}", "403")
    with pytest.raises(InputError):
        run(tmp_path)
    before = len(bucket.gets)
    result = run(tmp_path)
    assert result.resumed > 0
    assert len(bucket.gets) - before == 40 - result.resumed
    assert content(result.path) == objects


def test_file_damaged_between_interruption_and_next_run_is_not_kept(
    bucket: Bucket, tmp_path: Path
) -> None:
    objects = fill(bucket)
    bucket.fault("ds/train/c3/0039.png", "403")
    with pytest.raises(InputError):
        run(tmp_path)
    trees = list((tmp_path / ".kfsync" / "building").glob("*/tree"))
    victims = sorted(trees[0].rglob("*.png"))[:3]
    victims[0].write_bytes(b"x" * 3000)
    victims[1].unlink()
    victims[1].symlink_to("/etc/passwd")
    assert content(run(tmp_path).path) == objects


@pytest.mark.parametrize("versions", [True, False])
def test_two_runs_at_once_both_succeed(bucket: Bucket, tmp_path: Path, versions: bool) -> None:
    objects = fill(bucket, 100)
    bucket.delay = 0.01
    flags = ["--versions"] if versions else []
    processes = [start(tmp_path, *flags) for _ in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    assert content(tmp_path / "current" if versions else tmp_path) == objects
    assert len(bucket.gets) == 100


def test_second_run_that_must_not_wait_says_so(bucket: Bucket, tmp_path: Path) -> None:
    fill(bucket)
    store = Store(tmp_path)
    store.prepare()
    with (
        store.lock(0),
        pytest.raises(InputError, match=r"another sync is writing .* lock_wait"),
    ):
        run(tmp_path, lock_wait=0)


@contextlib.contextmanager
def small_disk(folder: Path, options: str) -> Iterator[Path]:
    """A real file system that is too small."""
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], capture_output=True
    )
    if done.returncode:
        pytest.skip(f"mounting a small disk needs root: {done.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [("size=64k", "free and 120.0 kB are to come"), ("size=8m,nr_inodes=30", "inodes free")],
)
def test_full_disk_is_refused_before_a_byte_is_written(
    bucket: Bucket, tmp_path: Path, options: str, message: str
) -> None:
    fill(bucket)
    with small_disk(tmp_path / "disk", options) as disk:
        with pytest.raises(InputError, match=message):
            run(disk)
        assert bucket.gets == []


@pytest.mark.parametrize("options", ["size=64k", "size=8m,nr_inodes=30"])
def test_disk_that_fills_up_meanwhile_is_one_line_and_can_be_resumed(
    bucket: Bucket, tmp_path: Path, options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = fill(bucket)
    monkeypatch.setattr(Store, "preflight", lambda *_: None)  # another writer took the room
    with small_disk(tmp_path / "disk", options) as disk:
        with pytest.raises(InputError, match=r"cannot write .*No space left.*free space"):
            run(disk)
        assert not (disk / "current").exists()
        subprocess.run(["mount", "-o", "remount,size=8m,nr_inodes=500", str(disk)], check=True)
        assert content(run(disk).path) == objects


@pytest.mark.parametrize("place", [".kfsync", "versions", ".kfsync/building", ".kfsync/lock"])
def test_planted_link_in_the_target_leads_nowhere(
    bucket: Bucket, tmp_path: Path, place: str
) -> None:
    fill(bucket)
    outside = tmp_path / "outside"
    outside.mkdir()
    target = tmp_path / "target"
    (target / place).parent.mkdir(parents=True)
    (target / place).symlink_to(outside)
    with pytest.raises(InputError, match=r"link|cannot write"):
        run(target)
    assert list(outside.iterdir()) == []


def test_planted_links_in_a_mirror_lead_nowhere(bucket: Bucket, tmp_path: Path) -> None:
    objects = fill(bucket)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("mine")
    target = tmp_path / "target"
    (target / "train").mkdir(parents=True)
    (target / "train/c0").symlink_to(outside)
    with pytest.raises(InputError, match=r"train/c0 is a link or a file where a folder must be"):
        run(target, mirror=True, delete=False)
    (target / "train/c0").unlink()
    (target / "train/c0").mkdir()
    (target / "train/c0/0000.png").symlink_to(outside / "file")
    run(target, mirror=True, delete=False)
    assert content(target) == objects
    assert (outside / "file").read_text() == "mine"


def test_link_planted_after_the_check_is_not_followed(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(bucket)
    outside, target = tmp_path / "outside", tmp_path / "target"
    outside.mkdir()
    plan = mirror._Plan.refuse_obstacles

    def plant_afterwards(self: mirror._Plan) -> None:
        plan(self)
        (target / "train").mkdir()
        (target / "train/c0").symlink_to(outside)

    monkeypatch.setattr(mirror._Plan, "refuse_obstacles", plant_afterwards)
    with pytest.raises(InputError, match="cannot write"):
        run(target, mirror=True, delete=False)
    assert list(outside.iterdir()) == []


HOSTILE = (
    "../evil.txt", "x/../../../evil2.txt", "/abs.txt", "a//c", "x/./y", "x/../z", "nul\0x",
    "new\nline", "L" * 1000, "deep/" + "n" * 300, "..", ".", "_SUCCESS", ".kfsync/lock",
    "_MANIFEST.jsonl", "dir-with-content/", "both",
)  # fmt: skip
HARMLESS = ("back\\slash", "..\\win", "con", "trail ", "-rf", "~root", "é.txt", "e\u0301.txt",
            "Case.txt", "case.txt", "both/b", "empty/", "%2E%2E/x", "a..b/...c")  # fmt: skip


def hostile(bucket: Bucket) -> None:
    for name in HOSTILE + HARMLESS:
        bucket.put(f"ds/{name}", b"" if name == "empty/" else f"content of {name}".encode())


def outside_of(target: Path) -> list[str]:
    return [path.name for path in target.parent.iterdir() if path != target]


@pytest.mark.parametrize("mirror", [False, True])
def test_hostile_names_are_an_error_by_default(
    bucket: Bucket, tmp_path: Path, mirror: bool
) -> None:
    hostile(bucket)
    target = tmp_path / "deep" / "target"
    target.mkdir(parents=True)
    with pytest.raises(InputError, match=f"^{len(HOSTILE)} object names cannot be files: "):
        run(target, mirror=mirror)
    assert bucket.gets == []
    assert outside_of(target) == []


@pytest.mark.parametrize("mirror", [False, True])
def test_hostile_names_can_be_skipped(bucket: Bucket, tmp_path: Path, mirror: bool) -> None:
    hostile(bucket)
    target = tmp_path / "deep" / "target"
    result = run(target, mirror=mirror, hostile_names="skip")
    assert {name for name, _ in result.names.skipped} == set(HOSTILE)
    files = {name: f"content of {name}".encode() for name in HARMLESS if name != "empty/"}
    assert content(result.path) == files
    assert (result.path / "empty").is_dir()
    assert outside_of(target) == []


@pytest.mark.parametrize("mirror", [False, True])
def test_hostile_names_can_be_encoded(bucket: Bucket, tmp_path: Path, mirror: bool) -> None:
    hostile(bucket)
    target = tmp_path / "deep" / "target"
    result = run(target, mirror=mirror, hostile_names="encode")
    found = content(result.path)
    assert set(result.names.encoded) == set(HOSTILE)
    assert len(found) == len(HOSTILE + HARMLESS) - 1
    for name, encoded in result.names.encoded.items():
        assert found[encoded] == f"content of {name}".encode()
    assert outside_of(target) == []
    assert run(target, mirror=mirror, hostile_names="encode").unchanged


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


@pytest.mark.parametrize("pack", ["none", "tar"])
def test_verify_finds_and_mends_damage(bucket: Bucket, tmp_path: Path, pack: str) -> None:
    objects = fill(bucket)
    first = run(tmp_path, pack=pack)
    assert run(tmp_path, pack=pack, verify="full").unchanged
    victim = next(first.path.rglob("*.tar" if pack == "tar" else "0007.png"))
    damaged = bytearray(victim.read_bytes())
    damaged[2000] ^= 1
    times = victim.stat()
    victim.write_bytes(damaged)
    os.utime(victim, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert run(tmp_path, pack=pack, verify="quick").unchanged, "same size and time: not seen"
    mended = run(tmp_path, pack=pack, verify="full")
    assert mended.repaired == 1
    assert unpacked(mended.path, pack) == objects
    assert run(tmp_path, pack=pack, verify="full").unchanged


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


def test_damage_in_the_version_before_does_not_spread(bucket: Bucket, tmp_path: Path) -> None:
    objects = fill(bucket)
    first = run(tmp_path)
    (first.path / "train/c0/0000.png").write_bytes(b"x" * 3000)
    bucket.put("ds/new", b"new")
    assert content(run(tmp_path).path) == objects | {"new": b"new"}


def test_packed_version_is_deterministic_and_reuses_what_is_unchanged(
    bucket: Bucket, tmp_path: Path
) -> None:
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


def test_archives_end_at_their_size(bucket: Bucket, tmp_path: Path) -> None:
    fill(bucket)
    listing = run(tmp_path, dry_run=True).names.listing
    stage = TarStage(tmp_path / "stage", listing, shard_bytes=20_000)
    assert {stage.place(i)[0] for i in range(40)} == {f"shard-{i:05}.tar" for i in range(7)}


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
    with pytest.raises(InputError):
        run(tmp_path, mirror=True, verify="full")
    assert content(tmp_path) == objects


def test_bandwidth_limit_slows_down(bucket: Bucket, tmp_path: Path) -> None:
    fill(bucket, 40, 10_000)
    began = time.monotonic()
    run(tmp_path, bandwidth=1e6)
    assert time.monotonic() - began >= 0.38, "400 kB at 1 MB/s"


def test_target_without_rights_is_one_line(bucket: Bucket, tmp_path: Path) -> None:
    if os.getuid():
        pytest.skip("needs root, to become another user")
    fill(bucket, 4)
    run(tmp_path / "imports-everything")
    target = tmp_path / "target"
    target.mkdir(mode=0o555)
    for parent in tmp_path.parents[:3]:
        parent.chmod(0o755)
    tmp_path.chmod(0o755)
    os.seteuid(65534)
    try:
        with pytest.raises(InputError, match=r"^cannot write .*as uid 65534.*\(fsGroup\)$"):
            run(target)
    finally:
        os.seteuid(0)


def test_threads_end_with_the_run(bucket: Bucket, tmp_path: Path) -> None:
    def threads() -> set[threading.Thread]:
        return {t for t in threading.enumerate() if "process_request" not in t.name}

    fill(bucket)
    before = threads()
    run(tmp_path)
    assert threads() == before
