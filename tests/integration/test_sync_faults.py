"""Every fault of a bucket ends in the right bytes or in a clear error, never in a wrong file."""

import itertools
import json
import random
from functools import partial
from pathlib import Path

import pytest

from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.datasets.transfer import SMALL
from tests import sync_runs
from tests.gcs_server import Bucket
from tests.sync_runs import content

run = partial(sync_runs.run, timeout=1)
LARGE = random.Random(1).randbytes(3 * SMALL + 500_000)
SMALL_BODY = random.Random(2).randbytes(20_000)
MENDABLE = (
    *("503", "429", "500", "408", "reset0", "reset", "fin", "shortlen", "corrupt", "stall"),
    "nonsense",
)


def fill(bucket: Bucket, body: bytes = SMALL_BODY) -> dict[str, bytes]:
    """Ten objects, the one with faults in their middle."""
    objects = {f"train/a/{i}.png": bytes([i]) * (100 + i) for i in range(9)} | {"train/b/x": body}
    bucket.put_all(objects)
    return objects


@pytest.mark.parametrize("body", [SMALL_BODY, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("fault", MENDABLE)
def test_mendable_fault_is_mended(bucket: Bucket, tmp_path: Path, fault: str, body: bytes) -> None:
    objects = fill(bucket, body)
    bucket.fault("ds/train/b/x", fault, fault)
    result = run(tmp_path)
    assert content(result.path) == objects
    assert result.retries == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "body"),
    [*((fault, SMALL_BODY) for fault in (*MENDABLE, "403"))]
    + [(fault, LARGE) for fault in ("503", "reset", "fin", "corrupt", "shortlen")],
)
def test_lasting_fault_fails_and_keeps_the_version_before(
    bucket: Bucket, tmp_path: Path, fault: str, body: bytes
) -> None:
    objects = fill(bucket)
    before = run(tmp_path)
    bucket.put("ds/train/b/x", body[:-1])
    bucket.fault("ds/train/b/x", *[fault] * 200)
    expected = InputError if fault == "403" else StorageError
    with pytest.raises(expected, match=r"^(cannot|no permission to) read [^\n]+$"):
        run(tmp_path)
    assert (tmp_path / "current").resolve() == before.path
    assert content(before.path) == objects
    assert [path.name for path in (tmp_path / "versions").iterdir()] == [before.digest[:12]]
    bucket.faults.clear()
    assert content(run(tmp_path).path) == objects | {"train/b/x": body[:-1]}


def test_corruption_after_a_resumed_range_is_found(bucket: Bucket, tmp_path: Path) -> None:
    objects = fill(bucket, LARGE)
    bucket.fault("ds/train/b/x", "reset", "corrupt-range")
    assert content(run(tmp_path).path) == objects
    assert bucket.gets.count("ds/train/b/x") == 3


def test_missing_hash_in_the_listing_is_refused(bucket: Bucket, tmp_path: Path) -> None:
    fill(bucket)
    bucket.objects["ds/train/b/x"].crc = ""
    with pytest.raises(InputError, match="gives no crc32c for 'ds/train/b/x'"):
        run(tmp_path)
    assert not list(tmp_path.iterdir())


def test_object_replaced_meanwhile_is_listed_again(bucket: Bucket, tmp_path: Path) -> None:
    objects = fill(bucket)
    bucket.fault("ds/train/b/x", "replaced")
    result = run(tmp_path)
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
    objects = fill(bucket)
    bucket.page = 3
    bucket.list_faults.extend(["503", fault])
    assert content(run(tmp_path).path) == objects
    assert bucket.lists == 6


def test_listing_without_end_is_one_line(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kfp_ddp.storage.source.MAX_EMPTY_PAGES", 20)
    pages = itertools.count()
    bucket.list_fault = lambda: f'{{"nextPageToken": "{next(pages)}"}}'  # type: ignore[method-assign]
    with pytest.raises(InputError, match=r"^the listing of gs://bucket/ds does not end[^\n]*$"):
        run(tmp_path)
    assert next(pages) < 25


def test_storm_over_every_object_is_survived(bucket: Bucket, tmp_path: Path) -> None:
    objects = fill(bucket)
    for at, name in enumerate(objects):
        bucket.fault(f"ds/{name}", *["503", "429", "nohash"][: 1 + at % 3])
    assert content(run(tmp_path).path) == objects


def test_only_what_changed_is_downloaded(bucket: Bucket, tmp_path: Path) -> None:
    objects = fill(bucket)
    first = run(tmp_path)
    bucket.gets.clear()
    bucket.lists = 0
    same = run(tmp_path)
    assert (same.unchanged, same.digest, same.path) == (True, first.digest, first.path)
    assert (bucket.lists, bucket.gets) == (1, [])
    bucket.put("ds/train/a/0.png", b"new")
    del bucket.objects["ds/train/a/1.png"]
    second = run(tmp_path)
    assert bucket.gets == ["ds/train/a/0.png"]
    assert (second.linked, second.downloaded, second.changes.removed) == (8, 1, ["train/a/1.png"])
    assert content(first.path) == objects
    del objects["train/a/1.png"]
    assert content(second.path) == objects | {"train/a/0.png": b"new"}
    assert (second.path / "train/b/x").samefile(first.path / "train/b/x")


def test_words_of_a_server_cannot_write_to_a_terminal(bucket: Bucket, tmp_path: Path) -> None:
    fill(bucket)
    bucket.put("ds/\x1b[2J", b"x")
    words = json.dumps({"error": {"message": "no \x1b[2J \x9b \u202e way\nat all"}})
    bucket.refusal = words.encode()
    bucket.list_faults.append("403")
    role = r"no permission to list.*roles/storage.objectViewer"
    with pytest.raises(InputError, match=role) as listing:
        run(tmp_path)
    bucket.fault("ds/\x1b[2J", "403")
    with pytest.raises(InputError, match="no permission to read") as reading:
        run(tmp_path, hostile_names="encode")
    for caught in (listing, reading):
        assert "way" in str(caught.value)
        assert str(caught.value).isprintable()
