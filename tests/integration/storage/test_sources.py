"""Sources other than a well-behaved bucket: expired tokens, S3, served versions, hostile names."""

import hashlib
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.datasets import report
from kfp_ddp.datasets.options import SyncOptions
from kfp_ddp.datasets.transfer import SMALL
from kfp_ddp.pictures.decoder import decode
from kfp_ddp.storage import event_loop, store
from kfp_ddp.storage.http.answer import Response
from kfp_ddp.storage.kinds import open_source, open_store
from kfp_ddp.storage.s3_objects import as_anonymous, s3_client
from kfp_ddp.storage.source import MAX_OBJECTS, Changed, Entry, Transient
from tests import tls
from tests.gcs_server import Bucket, serve
from tests.serving import Files, serving_by
from tests.sync_runs import content, pretend_folding, run, sync, write

QUICK = SyncOptions(concurrency=4, timeout=5)
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


@pytest.fixture
def guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """A bucket that wants a service account's token, as the real endpoint does."""
    bucket = Bucket()
    bucket.token = "none yet"
    with serve(bucket) as url:
        tls.google_account(tmp_path, f"{url}/token", monkeypatch)
        monkeypatch.setenv("API_ENDPOINT_OVERRIDE", url)
        monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
        yield bucket


def test_token_that_expires_in_the_middle_is_renewed_once(guarded: Bucket, tmp_path: Path) -> None:
    objects = {f"a/{i:03}": bytes([i]) * 500 for i in range(60)}
    guarded.put_all(objects)
    guarded.delay = 0.01
    given = guarded.next_fault

    def revoke_after_twenty(name: str) -> str:
        fault = given(name)
        if len(guarded.gets) == 20:
            guarded.token = "revoked"
        return fault

    guarded.next_fault = revoke_after_twenty  # type: ignore[method-assign]
    result = sync("gs://bucket/ds", tmp_path / "target", QUICK)
    assert content(result.path) == objects
    assert guarded.tokens_given == 2
    assert result.retries <= 4, "one for each connection at most"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pages", "tokens"), [([""], []), (["", "503"], []), ([""], ["reset0"]), ([""], ["503"] * 4)]
)
def test_token_that_expires_while_listing_is_renewed(
    guarded: Bucket, tmp_path: Path, pages: list[str], tokens: list[str]
) -> None:
    objects = {name: name.encode() for name in "abc"}
    guarded.put_all(objects)
    guarded.page = 1

    def revoke_after_these() -> str:
        fault = pages.pop(0)
        if not pages:
            guarded.token = "revoked"
            guarded.token_faults.extend(tokens)
            guarded.list_fault = lambda: ""  # type: ignore[method-assign]
        return fault

    guarded.list_fault = revoke_after_these  # type: ignore[method-assign]
    assert content(sync("gs://bucket/ds", tmp_path / "target", QUICK).path) == objects
    assert guarded.tokens_given == 2
    assert not guarded.token_faults


def test_account_that_may_not_list_gets_one_new_token(guarded: Bucket, tmp_path: Path) -> None:
    guarded.list_faults.extend(["401"] * 9)
    with pytest.raises(InputError, match=r"no permission to list .* as reader@project"):
        sync("gs://bucket/ds", tmp_path / "target", QUICK)
    assert guarded.tokens_given == 2


def test_account_without_a_token_is_one_line(guarded: Bucket, tmp_path: Path) -> None:
    guarded.deny_tokens = True
    with pytest.raises(InputError, match=r"credentials of reader@project.* give no token"):
        sync("gs://bucket/ds", tmp_path / "target", QUICK)


def test_s3_with_md5_checksum_and_multipart_objects(s3: Any, tmp_path: Path) -> None:
    objects = {"a/x.png": b"x" * 3000, "a/sum.png": b"y" * 300, "large": os.urandom(SMALL + 7)}
    for name, body in objects.items():
        algorithm = {"ChecksumAlgorithm": "SHA256"} if name == "a/sum.png" else {}
        s3.put_object(Bucket="bucket", Key=f"ds/{name}", Body=body, **algorithm)
    parts = [os.urandom(5 << 20), b"end"]
    upload = s3.create_multipart_upload(Bucket="bucket", Key="ds/parts")["UploadId"]
    where = {"Bucket": "bucket", "Key": "ds/parts", "UploadId": upload}
    etags = [
        s3.upload_part(**where, PartNumber=n, Body=part)["ETag"] for n, part in enumerate(parts, 1)
    ]
    listed = [{"ETag": etag, "PartNumber": n} for n, etag in enumerate(etags, 1)]
    s3.complete_multipart_upload(**where, MultipartUpload={"Parts": listed})
    objects["parts"] = b"".join(parts)
    first = sync("s3://bucket/ds", tmp_path, QUICK)
    assert content(first.path) == objects
    assert sync("s3://bucket/ds", tmp_path, QUICK).unchanged
    s3.put_object(Bucket="bucket", Key="ds/a/x.png", Body=b"z" * 3000)
    second = sync("s3://bucket/ds", tmp_path, QUICK)
    assert (second.downloaded, second.linked) == (1, 3)
    assert content(second.path) == objects | {"a/x.png": b"z" * 3000}


@pytest.mark.parametrize(
    ("upload", "found_by"), [("when_supported", "CRC32"), ("when_required", "MD5")]
)
@pytest.mark.parametrize("size", [3000, SMALL + 7])
def test_s3_body_with_wrong_bytes_fails(
    s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, upload: str, found_by: str, size: int
) -> None:
    import boto3
    from botocore.config import Config

    client = boto3.client("s3", config=Config(request_checksum_calculation=upload))
    client.put_object(Bucket="bucket", Key="ds/x", Body=b"x" * size)
    client.close()
    take = Response.take
    # A server that sends wrong bytes with the right headers cannot be had on demand.
    monkeypatch.setattr(Response, "take", lambda self: [b"y" * len(b) for b in take(self)])
    with pytest.raises(StorageError, match=rf"cannot read 'x' of s3://bucket/ds: {found_by}"):
        sync("s3://bucket/ds", tmp_path, QUICK)
    assert not (tmp_path / "current").exists()


def test_s3_object_of_another_size_or_content_is_not_read(s3: Any) -> None:
    s3.put_object(Bucket="bucket", Key="ds/x", Body=b"x" * 3000)
    source = open_source("s3://bucket/ds")
    listed = Entry("x", 0, hashlib.md5(b"x" * 3000, usedforsecurity=False).hexdigest(), 3000)
    with ThreadPoolExecutor(1) as threads:
        reader = source.reader(threads)
        assert event_loop.run(reader.read(listed)) == b"x" * 3000
        with pytest.raises(Transient, match="more than 5 bytes"):
            event_loop.run(reader.read(listed._replace(size=5)))
        for other in (listed._replace(tag="0" * 32), listed._replace(name="y")):
            with pytest.raises(Changed):
                event_loop.run(reader.read(other))
        reader.close()


def test_folder_with_links_and_empty_folders(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write(source, {"a/b/x y.png": b"x" * (SMALL + 1)})
    (source / "empty").mkdir()
    (source / "elsewhere").symlink_to("/etc/hostname")
    skipped = sync(f"file://{source}", tmp_path / "target", SyncOptions(symlinks="skip"))
    assert set(content(skipped.path)) == {"a/b/x y.png"}
    assert (skipped.path / "empty").is_dir()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.write_text(""), "is a file; give the folder"),
        (lambda path: path.mkdir(), "holds no files"),
    ],
)
def test_folders_that_cannot_be_a_source(tmp_path: Path, make: Any, message: str) -> None:
    make(tmp_path / "source")
    with pytest.raises(InputError, match=message):
        sync(str(tmp_path / "source"), tmp_path / "target", QUICK)
    assert not (tmp_path / "target").exists()


def test_markers_of_other_tools_are_left_out_and_told(tmp_path: Path) -> None:
    """As Spark and Beam leave one, and as a version of ours has both."""
    source = tmp_path / "source"
    write(source, {"a/part-0": b"data", "a/_SUCCESS": b""})
    plain = sync(str(source), tmp_path / "plain", QUICK)
    write(source, {"_SUCCESS": b"", "_MANIFEST.jsonl": b"{}"})
    result = sync(str(source), tmp_path / "target", QUICK)
    assert (result.digest, result.files) == (plain.digest, 2)
    assert (result.path / "a/_SUCCESS").read_bytes() == b""
    assert [name for name, _ in result.names.skipped] == ["_SUCCESS", "_MANIFEST.jsonl"]
    assert "- `'_SUCCESS': marks its writer's work as done" in report.markdown(result)
    assert "2 left out" in report.line(result)
    shutil.rmtree(source / "a")
    with pytest.raises(InputError, match="leave nothing to sync"):
        sync(str(source), tmp_path / "target", QUICK)


@pytest.mark.parametrize("protocol", ["HTTP/1.0", "HTTP/1.1"])
def test_version_that_is_served_feeds_another_sync(tmp_path: Path, protocol: str) -> None:
    source = tmp_path / "source"
    objects = {"a/x y%.png": b"x", "large": os.urandom(SMALL + 7), "empty": b""}
    write(source, objects)
    version = sync(str(source), tmp_path / "first", QUICK).path
    handler = type("Handler", (Files,), {"protocol_version": protocol})
    with serving_by(partial(handler, directory=str(version))) as base:
        second = sync(f"{base}/_MANIFEST.jsonl", tmp_path / "second", QUICK)
        assert content(second.path) == objects
        assert second.path.name == version.name
        (version / "a/x y%.png").write_bytes(b"y")
        with pytest.raises(StorageError, match=r"SHA256 .* instead of"):
            sync(f"{base}/_MANIFEST.jsonl", tmp_path / "third", QUICK)
        with pytest.raises(InputError, match="HTTP 404; check the address"):
            sync(f"{base}/none.jsonl", tmp_path / "third", QUICK)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://host/folder", "is not a manifest; give https"),
        ("s4://bucket/x", "unknown scheme s4://"),
        ("gs://", "names no bucket"),
        ("", "names no folder"),
    ],
)
def test_urls_that_name_nothing(tmp_path: Path, url: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        sync(url, tmp_path, QUICK)


def test_s3_may_be_anonymous(s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    s3.put_object(Bucket="bucket", Key="ds/x", Body=b"x", ACL="public-read")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    assert content(sync("s3://bucket/ds", tmp_path / "got", QUICK).path) == {"x": b"x"}
    assert as_anonymous(s3_client("s3://bucket").sdk)


def test_s3_digests(s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "TRIES", 1)
    file = tmp_path / "given"
    file.write_bytes(b"x" * 3000)
    open_store("s3://bucket/ds").put(file, "x")
    about = {"sha256": hashlib.sha256(b"y").hexdigest()}
    s3.put_object(Bucket="bucket", Key="ds/y", Body=b"z", Metadata=about)
    with pytest.raises(StorageError, match="cannot read 'y' of s3://bucket/ds: SHA256"):
        sync("s3://bucket/ds", tmp_path / "target", QUICK)
    with pytest.raises(StorageError, match=r"^cannot read s3://bucket/ds/y: SHA256"):
        open_store("s3://bucket/ds").read("y", 9)
    s3.delete_object(Bucket="bucket", Key="ds/y")
    assert content(sync("s3://bucket/ds", tmp_path / "target", QUICK).path) == {"x": b"x" * 3000}


def test_computed_images_are_a_dataset(tmp_path: Path) -> None:
    """Sizes are known before a pixel is; a seed is a version; an image has its class's colours."""
    results = [
        sync(f"synthetic://3x20@21?seed={seed}", tmp_path / str(number), QUICK)
        for number, seed in enumerate((1, 1, 2))
    ]
    first, second, other = (content(result.path) for result in results)
    assert first == second
    assert len({*open_source("synthetic://3x20@21").listing().tags}) == 20, "no two are the same"
    assert results[0].digest == results[1].digest != results[2].digest
    assert len(first) == len({*first.values(), *other.values()}) / 2 == 20
    assert {len(image) for image in first.values()} == {54 + 64 * 21}
    assert results[0].bytes == sum(map(len, first.values()))
    pictures = {name: decode(image)[0].astype(float) for name, image in first.items()}
    assert {picture.shape for picture in pictures.values()} == {(21, 21, 3)}
    one, same, another = (pictures[name] for name in ("c0/00.bmp", "c0/03.bmp", "c1/01.bmp"))
    assert abs(one - same).mean() < 32 < abs(one - another).mean()


@pytest.mark.parametrize("form", ["7x20@8", f"1x{MAX_OBJECTS + 1}@8"])
def test_computed_dataset_of_an_invalid_size_is_refused(form: str) -> None:
    with pytest.raises(InputError, match="classes"):
        open_source(f"synthetic://{form}")


@pytest.fixture
def target(bucket: Bucket, tmp_path: Path) -> Iterator[Path]:
    """Yield a target for a bucket of hostile names; no file is left outside of it."""
    for name in HOSTILE + HARMLESS:
        bucket.put(f"ds/{name}", b"" if name == "empty/" else f"content of {name}".encode())
    target = tmp_path / "deep" / "target"
    target.mkdir(parents=True)
    yield target
    assert list(target.parent.iterdir()) == [target]


def test_hostile_names_follow_their_policy(bucket: Bucket, target: Path) -> None:
    with pytest.raises(InputError, match=f"^{len(HOSTILE)} object names cannot be files: "):
        run(target)
    assert bucket.gets == []
    result = run(target, hostile_names="skip")
    assert {name for name, _ in result.names.skipped} == set(HOSTILE)
    files = {name: f"content of {name}".encode() for name in HARMLESS if name != "empty/"}
    assert content(result.path) == files
    assert (result.path / "empty").is_dir()
    result = run(target, hostile_names="encode")
    assert set(result.names.encoded) == set(HOSTILE)
    files |= {new: f"content of {name}".encode() for name, new in result.names.encoded.items()}
    assert content(result.path) == files
    assert run(target, hostile_names="encode").unchanged
    without = run(target, hostile_names="encode", exclude=("/new%0Aline", "/nul\0x"))
    left_out = {result.names.encoded[name] for name in ("new\nline", "nul\0x")}
    assert {*result.names.listing.names} - {*without.names.listing.names} == left_out


def test_names_that_are_one_on_this_disk_are_refused(bucket: Bucket, tmp_path: Path) -> None:
    for name in ("Cat.jpg", "cat.jpg"):
        bucket.put(f"ds/{name}", b"x")
    pretend_folding(tmp_path)
    with pytest.raises(InputError, match=r"'cat.jpg' \(same file as another name on this file sys"):
        run(tmp_path)
