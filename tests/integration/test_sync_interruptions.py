"""What a sync that was killed, raced or interrupted leaves, and how the next one goes on."""

import contextlib
import random
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.datasets import stage
from kfp_ddp.datasets.disk import locked
from kfp_ddp.datasets.options import Options
from kfp_ddp.datasets.sync import sync
from kfp_ddp.datasets.versions import Store
from tests.gcs_server import Bucket
from tests.sync_runs import content, damage, fill, run, start, unpacked


@pytest.mark.slow
@pytest.mark.parametrize("pack", ["none", "tar"])
def test_killed_at_random_it_completes_later(bucket: Bucket, tmp_path: Path, pack: str) -> None:
    objects = fill(bucket, 600)
    bucket.delay = 0.005
    choose = random.Random(3)
    for _ in range(4):
        served = len(bucket.gets) + choose.randint(1, 120)
        process = start(tmp_path, "--versions", "--pack", pack, "-j", "4")
        while len(bucket.gets) < served:
            assert process.poll() is None
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "the kill came too late"
        assert not list((tmp_path / "versions").iterdir())
        assert list((tmp_path / ".kfsync" / "building").iterdir())
    bucket.delay = 0
    result = run(tmp_path, pack=pack)
    assert unpacked(result.path, pack) == objects
    assert result.resumed > 0
    assert result.downloaded + result.resumed == 600


def test_interrupted_run_resumes_without_damaged_files(bucket: Bucket, tmp_path: Path) -> None:
    objects = fill(bucket)
    last = "train/c3/0039.png"
    bucket.fault(f"ds/{last}", "403")
    with pytest.raises(InputError):
        run(tmp_path)
    before = len(bucket.gets)
    trees = list((tmp_path / ".kfsync" / "building").glob("*/tree"))
    damaged, linked = sorted(trees[0].rglob("*.png"))[:2]
    damaged.write_bytes(b"x" * 3000)
    linked.unlink()
    linked.symlink_to("/etc/passwd")
    result = run(tmp_path)
    assert result.resumed > 0
    assert len(bucket.gets) - before == 40 - result.resumed
    assert content(result.path) == objects


def test_what_builds_of_other_versions_left_is_removed(bucket: Bucket, tmp_path: Path) -> None:
    fill(bucket, 4)
    building, left = tmp_path / ".kfsync" / "building", []
    for content_of_new in (b"1", b"2"):
        bucket.put("ds/new", content_of_new)
        bucket.fault("ds/new", "403")
        with pytest.raises(InputError):
            run(tmp_path)
        left.append([path.name for path in building.iterdir()])
    assert [len(names) for names in left] == [1, 1]
    assert left[0] != left[1]
    run(tmp_path)
    assert list(building.iterdir()) == []


def test_file_written_on_another_machine_is_read_again(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = fill(bucket)

    def interrupted(machine: str, at: str) -> set[Path]:
        monkeypatch.setattr(stage, "_boot", lambda: machine)  # there is but one machine here
        bucket.fault(f"ds/{at}", "403")
        with pytest.raises(InputError):
            run(tmp_path)
        return set((tmp_path / ".kfsync" / "building").rglob("*.png"))

    first = interrupted("one", "train/c0/0000.png")
    second = interrupted("another", "train/c3/0039.png") - first
    damage(second.pop())
    monkeypatch.setattr(stage, "_boot", lambda: "one")
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
    Store(tmp_path).prepare()
    who = rf"{socket.gethostname()} syncs gs://bucket/other since \d{{4}}-.* UTC"
    with (
        locked(tmp_path, 0, "gs://bucket/other", lambda *_: None),
        pytest.raises(StorageError, match=rf"another sync is writing .* \({who}\) .* lock_wait"),
    ):
        run(tmp_path, lock_wait=0)


def test_second_run_waits_and_then_lists_anew(bucket: Bucket, tmp_path: Path) -> None:
    objects = fill(bucket)
    Store(tmp_path).prepare()
    told: list[str] = []
    holding = contextlib.ExitStack()
    holding.enter_context(locked(tmp_path, 0, "gs://bucket/other", lambda *_: None))

    def watch(phase: str, *_: object) -> None:
        told.append(phase)
        if phase.startswith("waiting"):
            bucket.put("ds/new", b"new")
            holding.close()

    result = sync("gs://bucket/ds", tmp_path, Options(), watch)
    assert told[0] == told[2] == "listing"
    assert f"{tmp_path}: {socket.gethostname()} syncs gs://bucket/other since" in told[1]
    assert content(result.path) == objects | {"new": b"new"}


def test_version_that_is_there_waits_for_nobody(bucket: Bucket, tmp_path: Path) -> None:
    fill(bucket)
    first = run(tmp_path).path
    bucket.put("other/x", b"x")
    sync("gs://bucket/other", tmp_path, Options())
    with locked(tmp_path, 0, "gs://bucket/third", lambda *_: None):
        assert run(tmp_path, lock_wait=0).unchanged
        assert (tmp_path / "current").resolve() == first


def test_threads_end_with_the_run(bucket: Bucket, tmp_path: Path) -> None:
    fill(bucket)
    before = set(threading.enumerate())
    run(tmp_path)
    # The server has its own, and the process keeps one loop for all syncs with a pool of its own.
    kept = ("process_request", "data_sync", "asyncio_")
    born = {thread.name for thread in set(threading.enumerate()) - before}
    assert {name for name in born if not any(each in name for each in kept)} == set()
