"""Faults and interruptions of a sync."""

import contextlib
import itertools
import json
import random
import signal
import socket
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.datasets import stage
from kfp_ddp.datasets.disk import locked
from kfp_ddp.datasets.options import SyncOptions
from kfp_ddp.datasets.sync import sync
from kfp_ddp.datasets.transfer import SMALL
from kfp_ddp.datasets.versions import DatasetVersions
from tests import sync_runs
from tests.gcs_server import Bucket
from tests.sync_runs import content, damage, fill, run, start, unpacked

quick_run = partial(sync_runs.run, timeout=1)
LARGE = random.Random(1).randbytes(3 * SMALL + 500_000)
SMALL_BODY = random.Random(2).randbytes(20_000)
MENDABLE = (
    *("503", "429", "500", "408", "reset0", "reset", "fin", "shortlen", "corrupt", "stall"),
    "nonsense",
)


def fill_ten(bucket: Bucket, body: bytes = SMALL_BODY) -> dict[str, bytes]:
    """Ten objects, the one with faults in their middle."""
    objects = {f"train/a/{i}.png": bytes([i]) * (100 + i) for i in range(9)} | {"train/b/x": body}
    bucket.put_all(objects)
    return objects


@pytest.mark.parametrize("body", [SMALL_BODY, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("fault", MENDABLE)
def test_mendable_fault_is_mended(bucket: Bucket, tmp_path: Path, fault: str, body: bytes) -> None:
    objects = fill_ten(bucket, body)
    bucket.fault("ds/train/b/x", fault, fault)
    result = quick_run(tmp_path)
    assert content(result.path) == objects
    assert result.retries == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "body"),
    [*((fault, SMALL_BODY) for fault in (*MENDABLE, "403"))]
    + [(fault, LARGE) for fault in ("503", "reset", "fin", "corrupt", "shortlen")],
)
def test_lasting_fault(bucket: Bucket, tmp_path: Path, fault: str, body: bytes) -> None:
    objects = fill_ten(bucket)
    before = quick_run(tmp_path)
    bucket.put("ds/train/b/x", body[:-1])
    bucket.fault("ds/train/b/x", *[fault] * 200)
    expected = InputError if fault == "403" else StorageError
    with pytest.raises(expected, match=r"^(cannot|no permission to) read [^\n]+$") as caught:
        quick_run(tmp_path)
    assert caught.value.retryable == (fault not in ("403", "corrupt", "shortlen"))
    assert (tmp_path / "current").resolve() == before.path
    assert content(before.path) == objects
    assert [path.name for path in (tmp_path / "versions").iterdir()] == [before.digest[:12]]
    bucket.faults.clear()
    assert content(quick_run(tmp_path).path) == objects | {"train/b/x": body[:-1]}


def test_corruption_after_a_resumed_range_is_found(bucket: Bucket, tmp_path: Path) -> None:
    objects = fill_ten(bucket, LARGE)
    bucket.fault("ds/train/b/x", "reset", "corrupt-range")
    assert content(quick_run(tmp_path).path) == objects
    assert bucket.gets.count("ds/train/b/x") == 3


def test_missing_hash_in_the_listing_is_refused(bucket: Bucket, tmp_path: Path) -> None:
    fill_ten(bucket)
    bucket.objects["ds/train/b/x"].crc = ""
    with pytest.raises(InputError, match="gives no crc32c for 'ds/train/b/x'"):
        quick_run(tmp_path)
    assert not list(tmp_path.iterdir())


def test_object_replaced_meanwhile_is_listed_again(bucket: Bucket, tmp_path: Path) -> None:
    objects = fill_ten(bucket)
    bucket.fault("ds/train/b/x", "replaced")
    result = quick_run(tmp_path)
    assert content(result.path) == objects | {"train/b/x": SMALL_BODY + b"!"}
    assert bucket.lists == 2


@pytest.mark.parametrize(
    "fault",
    [
        *("503", "429", "reset0", "endless", '{"items": [', "[]", '{"items": 7}'),
        *('{"items": [{"name": 7}]}', '{"items": [{"name": "ds/x", "size": "-1"}]}'),
        *("[" * 100_000, '{"nextPageToken": {}}'),
    ],
)
def test_list_page_that_fails_is_asked_again(bucket: Bucket, tmp_path: Path, fault: str) -> None:
    objects = fill_ten(bucket)
    bucket.page = 3
    bucket.list_faults.extend(["503", fault])
    assert content(quick_run(tmp_path).path) == objects
    assert bucket.lists == 6


def test_endless_listing(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kfp_ddp.storage.source.MAX_EMPTY_PAGES", 20)
    pages = itertools.count()
    bucket.list_fault = lambda: f'{{"nextPageToken": "{next(pages)}"}}'  # type: ignore[method-assign]
    with pytest.raises(InputError, match=r"^the listing of gs://bucket/ds does not end[^\n]*$"):
        quick_run(tmp_path)
    assert next(pages) < 25


def test_only_what_changed_is_downloaded(bucket: Bucket, tmp_path: Path) -> None:
    objects = fill_ten(bucket)
    first = quick_run(tmp_path)
    bucket.gets.clear()
    bucket.lists = 0
    same = quick_run(tmp_path)
    assert (same.unchanged, same.digest, same.path) == (True, first.digest, first.path)
    assert (bucket.lists, bucket.gets) == (1, [])
    bucket.put("ds/train/a/0.png", b"new")
    del bucket.objects["ds/train/a/1.png"]
    second = quick_run(tmp_path)
    assert bucket.gets == ["ds/train/a/0.png"]
    assert (second.linked, second.downloaded, second.changes.removed) == (8, 1, ["train/a/1.png"])
    assert content(first.path) == objects
    del objects["train/a/1.png"]
    assert content(second.path) == objects | {"train/a/0.png": b"new"}
    assert (second.path / "train/b/x").samefile(first.path / "train/b/x")


def test_words_of_a_server_cannot_write_to_a_terminal(bucket: Bucket, tmp_path: Path) -> None:
    fill_ten(bucket)
    bucket.put("ds/\x1b[2J", b"x")
    words = json.dumps({"error": {"message": "no \x1b[2J \x9b \u202e way\nat all"}})
    bucket.refusal = words.encode()
    bucket.list_faults.append("403")
    role = r"no permission to list.*roles/storage.objectViewer"
    with pytest.raises(InputError, match=role) as listing:
        quick_run(tmp_path)
    bucket.fault("ds/\x1b[2J", "403")
    with pytest.raises(InputError, match="no permission to read") as reading:
        quick_run(tmp_path, hostile_names="encode")
    for caught in (listing, reading):
        assert "way" in str(caught.value)
        assert str(caught.value).isprintable()


@pytest.mark.slow
@pytest.mark.parametrize("pack", ["none", "tar"])
def test_killed_at_random_it_completes_later(bucket: Bucket, tmp_path: Path, pack: str) -> None:
    objects = fill(bucket, 600)
    bucket.delay = 0.005
    choose = random.Random(3)
    for _ in range(4):
        served = len(bucket.gets) + choose.randint(1, 120)
        process = start(tmp_path, "--pack", pack, "-j", "4")
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


def test_foreign_file_read(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_two_runs_at_once_both_succeed(bucket: Bucket, tmp_path: Path) -> None:
    objects = fill(bucket, 100)
    bucket.delay = 0.01
    processes = [start(tmp_path) for _ in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    assert content(tmp_path / "current") == objects
    assert len(bucket.gets) == 100


def test_second_run_that_must_not_wait_says_so(bucket: Bucket, tmp_path: Path) -> None:
    fill(bucket)
    DatasetVersions(tmp_path).prepare()
    who = rf"{socket.gethostname()} syncs gs://bucket/other since \d{{4}}-.* UTC"
    with (
        locked(tmp_path, 0, "gs://bucket/other", lambda *_: None),
        pytest.raises(StorageError, match=rf"another sync is writing .* \({who}\) .* lock_wait"),
    ):
        run(tmp_path, lock_wait=0)


def test_second_run_waits_and_then_lists_anew(bucket: Bucket, tmp_path: Path) -> None:
    objects = fill(bucket)
    DatasetVersions(tmp_path).prepare()
    error: list[str] = []
    holding = contextlib.ExitStack()
    holding.enter_context(locked(tmp_path, 0, "gs://bucket/other", lambda *_: None))

    def watch(phase: str, *_: object) -> None:
        error.append(phase)
        if phase.startswith("waiting"):
            bucket.put("ds/new", b"new")
            holding.close()

    result = sync("gs://bucket/ds", tmp_path, SyncOptions(), watch)
    assert error[0] == error[2] == "listing"
    assert f"{tmp_path}: {socket.gethostname()} syncs gs://bucket/other since" in error[1]
    assert content(result.path) == objects | {"new": b"new"}


def test_version_that_is_there_waits_for_nobody(bucket: Bucket, tmp_path: Path) -> None:
    fill(bucket)
    first = run(tmp_path).path
    bucket.put("other/x", b"x")
    sync("gs://bucket/other", tmp_path, SyncOptions())
    with locked(tmp_path, 0, "gs://bucket/third", lambda *_: None):
        assert run(tmp_path, lock_wait=0).unchanged
        assert (tmp_path / "current").resolve() == first


def test_threads_end_with_the_run(bucket: Bucket, tmp_path: Path) -> None:
    fill(bucket)
    before = set(threading.enumerate())
    run(tmp_path)
    # The server has its own, and the process keeps one loop for all syncs with a pool of its own.
    remaining = ("process_request", "data_sync", "asyncio_")
    born = {thread.name for thread in set(threading.enumerate()) - before}
    assert {name for name in born if not any(each in name for each in remaining)} == set()
