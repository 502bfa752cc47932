"""What is the same is the same: an object of equal size and crc32c, made by others, is another."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import google_crc32c
import pytest

from kfp_ddp.datasets import sync as syncing
from kfp_ddp.datasets.options import SyncOptions
from kfp_ddp.datasets.report import Result
from kfp_ddp.storage.kinds import open_store
from kfp_ddp.storage.listing import Listing
from tests.files import forged
from tests.gcs_server import Bucket
from tests.serving import Files, serving_by
from tests.sync_runs import content, damage, manifest, sync, unpacked, write

Put = Callable[[str, bytes], None]
Run = Callable[..., Result]
GOOD = {"a/1.png": b"cat" * 50, "a/2.png": b"dog" * 50, "b/3.png": b"bird" * 50}
BAD = forged(b"cow" * 48 + b"??", google_crc32c.value(GOOD["a/1.png"]))
ALL = [("bucket", "none"), ("bucket", "tar"), ("folder", "none"), ("folder", "tar")]


@pytest.fixture
def sourced(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Put, Run]:
    """A source with the good objects: how to put one there, and how to sync it."""
    bucket: Bucket = request.getfixturevalue("bucket")
    address = f"{tmp_path}/source" if request.param == "folder" else "gs://bucket/ds"

    def put(name: str, data: bytes) -> None:
        if request.param == "folder":
            write(tmp_path / "source", {name: data})
        else:
            bucket.put(f"ds/{name}", data)

    for name, data in GOOD.items():
        put(name, data)

    def run(**options: Any) -> Result:
        return sync(address, tmp_path / "target", SyncOptions(**{"concurrency": 4} | options))

    return put, run


@pytest.fixture
def earlier(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Lists crc32c alone, as an earlier release did, until it is called."""
    add = Listing.add
    with monkeypatch.context() as patch:
        patch.setattr(Listing, "add", lambda self, *row, **_: add(self, *row[:4]))
        yield patch.undo


def test_the_pair_is_forged() -> None:
    assert len(BAD) == len(GOOD["a/1.png"])
    assert google_crc32c.value(BAD) == google_crc32c.value(GOOD["a/1.png"])


@pytest.mark.parametrize(("sourced", "pack"), ALL, indirect=["sourced"])
@pytest.mark.parametrize("verify", ["list", "full"])
def test_a_forged_object_is_a_new_version(sourced: tuple[Put, Run], pack: str, verify: str) -> None:
    put, run = sourced
    before = run(pack=pack)
    put("a/1.png", BAD)
    after = run(pack=pack, verify=verify)
    assert (after.unchanged, after.digest == before.digest) == (False, False)
    assert unpacked(after.path, pack) == GOOD | {"a/1.png": BAD}
    assert unpacked(before.path, pack) == GOOD
    assert (after.downloaded, run(pack=pack, verify=verify).unchanged) == (1, True)


@pytest.mark.parametrize(("sourced", "pack"), ALL, indirect=["sourced"])
def test_a_forged_file_of_a_version_is_mended(sourced: tuple[Put, Run], pack: str) -> None:
    _, run = sourced
    version = run(pack=pack).path
    file = next(version.glob("*.tar")) if pack == "tar" else version / "a/1.png"
    file.chmod(0o644)
    file.write_bytes(file.read_bytes().replace(GOOD["a/1.png"], BAD))
    assert run(pack=pack, verify="full").repaired == 1
    assert unpacked(version, pack) == GOOD


@pytest.mark.parametrize(("sourced", "pack"), ALL, indirect=["sourced"])
def test_a_version_of_an_earlier_release_keeps_its_name(
    sourced: tuple[Put, Run],
    pack: str,
    earlier: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put, run = sourced
    before = run(pack=pack)
    earlier()
    first = run(pack=pack)
    assert (first.unchanged, first.path, first.digest) == (True, before.path, before.digest)
    assert first.exact != before.digest
    with monkeypatch.context() as patch:
        patch.delattr(syncing, "confirm")  # its files are read once
        assert run(pack=pack).unchanged
    assert run(pack=pack, verify="full").unchanged
    put("b/new.png", b"new")
    later = run(pack=pack)
    assert (later.downloaded, unpacked(later.path, pack)) == (1, GOOD | {"b/new.png": b"new"})


@pytest.mark.parametrize(("sourced", "pack"), ALL, indirect=["sourced"])
@pytest.mark.parametrize("named", [False, True], ids=["forged", "and another"])
def test_what_was_forged_before_the_upgrade_is_found(
    sourced: tuple[Put, Run], pack: str, named: bool, earlier: Callable[[], None]
) -> None:
    put, run = sourced
    before = run(pack=pack)
    put("a/1.png", BAD)
    if named:
        put("b/new.png", b"new")
    assert run(pack=pack).unchanged is not named
    earlier()
    after = run(pack=pack)
    more = {"b/new.png": b"new"} if named else {}
    assert unpacked(after.path, pack) == GOOD | {"a/1.png": BAD} | more
    assert (after.downloaded, after.digest == before.digest) == (1, False)


def test_a_composite_object_is_its_generation(
    bucket: Bucket, tmp_path: Path, earlier: Callable[[], None]
) -> None:
    bucket.put_all(GOOD)
    bucket.put("ds/a/1.png", GOOD["a/1.png"], composite=True)
    run = partial(sync, "gs://bucket/ds", tmp_path, SyncOptions())
    run()
    earlier()
    upgraded = run()
    assert (upgraded.downloaded, upgraded.linked) == (1, 2), "nothing else vouches for it"
    assert run().unchanged
    bucket.put("ds/a/1.png", BAD, composite=True)
    assert content(run().path) == GOOD | {"a/1.png": BAD}


def test_what_only_a_crc32c_identifies_is_said(tmp_path: Path) -> None:
    for name, data in {**GOOD, "_MANIFEST.jsonl": manifest(GOOD)}.items():
        write(tmp_path / "site", {name: data})
    lines: list[str] = []
    with serving_by(partial(Files, directory=str(tmp_path / "site"))) as url:
        watch = lambda phase, *_: lines.append(phase)  # noqa: E731
        sync(f"{url}/_MANIFEST.jsonl", tmp_path / "a", SyncOptions(), watch)
        assert any("crc32c for 3 objects" in line for line in lines)


def test_a_file_of_a_manifest_has_the_hash_in_it(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put_all(GOOD)
    version = sync("gs://bucket/ds", tmp_path / "first", SyncOptions()).path
    with serving_by(partial(Files, directory=str(version))) as url:
        run = partial(sync, f"{url}/_MANIFEST.jsonl", tmp_path / "second", SyncOptions())
        second = run()
        assert (content(second.path), second.names.listing.weak) == (GOOD, 0)
        file = version / "a/1.png"
        file.chmod(0o644)
        file.write_bytes(BAD)
        with pytest.raises(Exception, match="MD5"):
            sync(f"{url}/_MANIFEST.jsonl", tmp_path / "third", SyncOptions())


def test_a_file_that_is_exchanged_after_the_listing_is_listed_again(tmp_path: Path) -> None:
    write(tmp_path / "source", GOOD)

    def watch(phase: str, *_: Any) -> None:
        if phase == "downloading":
            write(tmp_path / "source", {"a/1.png": BAD})

    first = sync(f"{tmp_path}/source", tmp_path / "target", SyncOptions(), watch)
    assert content(first.path) == GOOD | {"a/1.png": BAD}
    assert sync(f"{tmp_path}/source", tmp_path / "other", SyncOptions()).digest == first.digest
    write(tmp_path / "source", GOOD)
    assert sync(f"{tmp_path}/source", tmp_path / "other", SyncOptions()).digest != first.digest


def test_a_forged_object_is_replaced_in_a_store(bucket: Bucket) -> None:
    bucket.put("models/m", BAD)
    store = open_store("gs://bucket/models")
    assert store.write("m", GOOD["a/1.png"])
    assert not store.write("m", GOOD["a/1.png"])
    assert store.read("m", 1 << 20) == GOOD["a/1.png"]


def test_damage_is_still_found_by_crc32c_alone(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put_all(GOOD)
    bucket.put("ds/a/1.png", GOOD["a/1.png"], composite=True)
    version = sync("gs://bucket/ds", tmp_path, SyncOptions()).path
    (version / "a/1.png").chmod(0o644)
    damage(version / "a/1.png")
    assert sync("gs://bucket/ds", tmp_path, SyncOptions(verify="full")).repaired == 1
