"""Datasets at HTTP addresses and on the Hugging Face Hub."""

import base64
import hashlib
import io
import json
import re
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pyarrow.parquet
import pytest

from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.datasets.images import sample
from kfp_ddp.datasets.options import SyncOptions
from kfp_ddp.pictures.reading import RULE
from kfp_ddp.storage.kinds import open_source
from kfp_ddp.storage.source import SourceOptions
from tests.serving import Handler, RawServer, head, serving, serving_by
from tests.sync_runs import RETRY, content, manifest, sync

QUICK = SyncOptions(concurrency=2, timeout=5)
FILES = {"a/x": b"x" * 3000, "b": b"y" * 20}
COMMIT = "c0ffee" + "0" * 34


def sized(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    return head(body, status, *headers) + body


def chunked(body: bytes, trailers: bytes = b"", size: int = 1000) -> bytes:
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    chunks = b"".join(b"%x;name=value\r\n%b\r\n" % (len(part), part) for part in parts)
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + chunks + b"0\r\n" + trailers + b"\r\n"


@pytest.fixture
def web() -> Iterator[RawServer]:
    """A server of the files and their manifest."""
    server = RawServer()
    server.answers = {f"/v/{name}": sized(body) for name, body in FILES.items()}
    server.answers["/v/_MANIFEST.jsonl"] = sized(manifest(FILES))
    with serving(server):
        yield server


@pytest.fixture
def login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A netrc file with our login at the server."""
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password p@ss\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def address(web: RawServer) -> str:
    return f"http://127.0.0.1:{web.server_address[1]}/v/_MANIFEST.jsonl"


def bring(url: str, target: Path) -> dict[str, bytes]:
    return content(sync(url, target, QUICK).path)


def test_chunked_body_needs_no_more_memory_than_some_blocks(web: RawServer, tmp_path: Path) -> None:
    body = bytes(32 << 20)
    web.answers["/v/_MANIFEST.jsonl"] = sized(manifest({"big": body}))
    web.answers["/v/big"] = chunked(body, size=8 << 20)
    tracemalloc.start()
    try:
        version = sync(address(web), tmp_path, QUICK).path
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20
    assert (version / "big").read_bytes() == body


@pytest.mark.usefixtures("login")
def test_login_of_the_netrc_file_is_sent(web: RawServer, tmp_path: Path) -> None:
    assert bring(address(web), tmp_path / "target") == FILES
    login = "Basic " + base64.b64encode(b"me:p@ss").decode()
    host = f"127.0.0.1:{web.server_address[1]}"
    assert [(h["host"], h["authorization"]) for _, h in web.seen] == [(host, login)] * 3
    for text, line in (("machine", "line 1 is wrong"), (None, "No such file")):
        (tmp_path / "netrc").unlink() if text is None else (tmp_path / "netrc").write_text(text)
        with pytest.raises(InputError, match=f"^cannot read the netrc file [^\n]*{line}[^\n]*$"):
            bring(address(web), tmp_path / "target")


@pytest.mark.usefixtures("login")
def test_plain_http_from_elsewhere_is_told_once(web: RawServer, tmp_path: Path) -> None:
    with (tmp_path / "netrc").open("a") as netrc:
        netrc.write("machine 0.0.0.0 login me password p@ss\n")
    for host, times in (("0.0.0.0", 1), ("127.0.0.1", 0)):
        notices: list[str] = []

        def watch(phase: str, *_: object, notices: list[str] = notices) -> None:
            notices.append(phase)

        url = address(web).replace("127.0.0.1", host)
        web.seen.clear()
        sync(url, tmp_path / host, QUICK, watch)
        assert {"authorization" in headers for _, headers in web.seen} == {not times}
        notice = f"{url} comes over plain http://, so it can be read and changed on the way"
        assert notices.count(notice) == times


@pytest.mark.usefixtures("login")
def test_redirects_of_manifest_and_files_are_followed(web: RawServer, tmp_path: Path) -> None:
    with serving(far := RawServer()) as elsewhere:
        for path in list(web.answers):
            far.answers[f"/cdn{path}"] = web.answers[path]
            web.answers[path] = sized(b"moved", "302 Found", f"Location: {elsewhere}/cdn{path}")
        web.answers["/v/b"] = sized(b"", "307 Temporary Redirect", "Location: c?signed=1%2F2")
        web.answers["/v/c?signed=1%2F2"] = sized(FILES["b"])
        assert bring(address(web), tmp_path / "target") == FILES
        assert all("authorization" in headers for _, headers in web.seen)
        assert len(far.seen) == 2
        assert not any("authorization" in headers for _, headers in far.seen)


@pytest.mark.parametrize("answer", [sized, chunked])
def test_manifest_has_a_longest_length(
    web: RawServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    answer: Callable[[bytes], bytes],
) -> None:
    monkeypatch.setattr("kfp_ddp.storage.web.MAX_MANIFEST", 3 << 20)
    monkeypatch.setattr("kfp_ddp.storage.web.Retry", lambda: RETRY)
    web.answers["/v/_MANIFEST.jsonl"] = answer(manifest(FILES) + b"\n" + b" \n" * (3 << 19))
    with pytest.raises((StorageError, InputError), match=r"more than 3,145,728 bytes|line 4 is"):
        bring(address(web), tmp_path)


@pytest.mark.parametrize("path", ["/v/_MANIFEST.jsonl", "/v/b"])
@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("#", "redirects more than 5 times"),
        ("ftp://127.0.0.1/x", "is not an address"),
        ("http://[/x", "is not an address"),
    ],
)
def test_redirects_that_lead_nowhere_are_one_line(
    web: RawServer, tmp_path: Path, path: str, location: str, message: str
) -> None:
    web.answers[path] = sized(b"", "301 Moved Permanently", f"Location: {location}")
    with pytest.raises(InputError, match=f"^[^\n]*({message})[^\n]*$"):
        bring(address(web), tmp_path)
    assert len([seen for seen, _ in web.seen if seen == path]) <= 6


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 20_000, "endless head"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 20, "without end"),
        (sized(b"", "200 OK", "Content-Length: 5"), "two headers content-length"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n", "transfer-encoding"),
        (chunked(b"")[:-5] + b"5\r\nhello, world\r\n0\r\n\r\n", "a chunk is longer"),
        (chunked(b"")[:-5] + b"1" * 5000, "endless line"),
        (chunked(b"", b"X: y\r\n" * 20_000), "endless trailers"),
    ],
)
def test_endless_answers(web: RawServer, tmp_path: Path, answer: bytes, message: str) -> None:
    web.answers["/v/b"] = answer
    with pytest.raises(StorageError, match=f"^cannot read 'b' of [^\n]*{message}[^\n]*$"):
        bring(address(web), tmp_path)


@dataclass
class Hub:
    """The dataset owner/pets."""

    files: dict[str, bytes] = field(default_factory=dict)
    large: set[str] = field(default_factory=set)
    """Those in large file storage, which another server sends."""
    wrong: set[str] = field(default_factory=set)
    """Those that are sent with another byte."""
    gated: bool = False
    page: bytes = b""
    """A page of the listing in place of the right one."""
    asked: list[tuple[str, str]] = field(default_factory=list)
    """Paths, and what authorised them."""
    ranges: int = 0
    """Number of requests for a part of a file."""

    def described(self, name: str) -> dict[str, Any]:
        """A file in a listing."""
        body = self.files[name]
        oid = hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()
        row: dict[str, Any] = {"type": "file", "path": name, "size": len(body), "oid": oid}
        if name in self.large:
            sha256 = hashlib.sha256(body).hexdigest()
            row["lfs"] = {"oid": sha256, "size": len(body), "pointerSize": 130}
        return row


def handler(hub: Hub, stored_at: list[str]) -> type[Handler]:
    """What the hub answers; large files are at the first of `stored_at`."""

    class Visit(Handler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.asked.append((path, self.headers.get("Authorization", "")))
            kind, _, rest = path.partition("/owner/pets")
            if not rest and kind != "/api/datasets":
                self.answer(404, b"{}", X_Error_Code="RepoNotFound")
            elif hub.gated:
                self.answer(403, b"{}", X_Error_Code="GatedRepo")
            elif kind == "/api/datasets" and rest in ("", "/revision/main", f"/revision/{COMMIT}"):
                self.answer(200, {"id": "owner/pets", "sha": COMMIT})
            elif rest.startswith("/revision/"):
                self.answer(404, b"{}", X_Error_Code="RevisionNotFound")
            elif rest.startswith(f"/tree/{COMMIT}"):
                folder = rest.removeprefix(f"/tree/{COMMIT}").strip("/")
                rows = [hub.described(name) for name in hub.files if name.startswith(folder)]
                rows.append({"type": "directory", "path": "train", "oid": "0" * 40})
                self.answer(200, hub.page or rows, Content_Type="application/json")
            else:
                self.send_file(rest.removeprefix(f"/resolve/{COMMIT}/").removeprefix("/stored/"))

        def do_POST(self) -> None:
            query = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
            self.answer(200, [hub.described(name) for name in query["paths"]])

        def send_file(self, name: str) -> None:
            if name in hub.large and not self.path.startswith("/owner/pets/stored/"):
                self.answer(302, b"", Location=f"{stored_at[0]}/owner/pets/stored/{name}")
                return
            body = hub.files[name]
            body = body[:-1] + b"?" if name in hub.wrong else body
            if part := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
                hub.ranges += 1
                self.answer(206, body[int(part[1]) : int(part[2]) + 1])
            else:
                self.answer(200, body)

    return Visit


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub, and a second server for its large files."""
    hub, stored_at = Hub(), list[str]()
    made = handler(hub, stored_at)
    with serving_by(made) as url, serving_by(made) as elsewhere:
        stored_at.append(elsewhere.replace("127.0.0.1", "localhost"))
        monkeypatch.setenv("HF_ENDPOINT", url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)
        monkeypatch.setattr("huggingface_hub.utils._auth._get_token_from_environment", "t".strip)
        yield hub
        from huggingface_hub import close_session

        close_session()


def test_a_dataset_of_the_hub_is_synced_and_its_token_stays(hub: Hub, tmp_path: Path) -> None:
    hub.files = {
        "train/cat/ä b.jpg": b"x" * 3000,
        "train/dog/1.jpg": b"y" * 700_000,
        "val/cat/1.jpg": b"",
        ".gitattributes": b"*.jpg filter=lfs",
    }
    hub.large = {"train/dog/1.jpg"}
    wanted = {name: body for name, body in hub.files.items() if name[0] != "."}
    first = sync("hf://datasets/owner/pets", tmp_path, QUICK)
    assert content(first.path) == wanted
    assert sync("hf://datasets/owner/pets@main", tmp_path, QUICK).digest == first.digest
    part = sync("hf://datasets/owner/pets/train/", tmp_path / "part", QUICK)
    assert sorted(content(part.path)) == ["cat/ä b.jpg", "dog/1.jpg"]
    sent = {path.partition("/stored/")[1]: token for path, token in hub.asked}
    assert sent == {"": "Bearer t", "/stored/": ""}


@pytest.mark.parametrize(("large", "found_by"), [(True, "SHA256"), (False, "SHA1")])
def test_a_changed_file_is_refused(hub: Hub, tmp_path: Path, large: bool, found_by: str) -> None:
    hub.files, hub.wrong = {"x": b"x" * 3000}, {"x"}
    hub.large = {"x"} if large else set()
    with pytest.raises(StorageError, match=f"cannot read 'x' of hf://datasets/.*: {found_by}"):
        sync("hf://datasets/owner/pets", tmp_path, QUICK)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("hf://owner/pets", "write hf://datasets/owner/name"),
        ("hf://datasets/owner/absent", "dataset owner/absent does not exist .* give HF_TOKEN"),
        ("hf://datasets/owner/pets@old", "has no revision 'old'"),
        ("hf://datasets/owner/pets/none", "holds no objects below 'none/'"),
        ("hf://datasets/owner/pets", "is gated: accept its terms .* give HF_TOKEN"),
    ],
)
def test_a_dataset_that_cannot_be_listed_is_one_line(hub: Hub, url: str, says: str) -> None:
    hub.files = {"train/a/1.jpg": b"1"}
    hub.gated = "gated" in says
    with pytest.raises(InputError, match=says):
        open_source(url).listing()


@pytest.mark.parametrize(
    "page",
    [
        *(
            json.dumps([{"type": "file", "path": "x", "oid": oid, "size": size}]).encode()
            for oid, size in [("0" * 40, -5), ("0" * 40, 1e300), ("0" * 40, "5"), (7, 5), ("0", 5)]
        ),
        b'[{"type": "file", "path": "x"}]',
        b'{"error": "x"}',
        b"[" * 100_000,
        b"<html>",
    ],
)
def test_invalid_listing_of_the_hub_fails_with_one_line(hub: Hub, page: bytes) -> None:
    hub.page = page
    with pytest.raises(InputError, match="cannot list hf://datasets/owner/pets: the response"):
        open_source("hf://datasets/owner/pets").listing()


PARQUET = Path(__file__).with_name("hub_parquet")
"""Written by `Dataset.to_parquet(…, batch_size=2)` of datasets 5.2.0, with PNG and JPEG."""
PICTURES = [
    "train/cat/train-00000-of-00002-0000000.png",
    "train/cat/train-00000-of-00002-0000003.png",
    "train/cat/train-00001-of-00002-0000002.jpeg",
    "train/dog, big/train-00000-of-00002-0000001.png",
    "train/dog, big/train-00001-of-00002-0000000.jpeg",
    "train/n%2Fa/train-00000-of-00002-0000002.png",
    "train/n%2Fa/train-00001-of-00002-0000001.jpeg",
    "validation/cat/validation-00000-of-00001-0000000.png",
    "validation/dog, big/validation-00000-of-00001-0000001.png",
    "validation/n%2Fa/validation-00000-of-00001-0000002.png",
]
"""The fifth row of the first file has no class."""


@pytest.fixture
def pictures(hub: Hub) -> Hub:
    """A hub whose dataset is Parquet files, as `datasets` writes them."""
    hub.files = {f"data/{path.name}": path.read_bytes() for path in PARQUET.iterdir()}
    hub.large = set(hub.files)
    hub.files["README.md"] = b"# Pets"
    return hub


def rows_of(name: str) -> list[dict[str, Any]]:
    return list(pyarrow.parquet.read_table(PARQUET / name).to_pylist())


def table(rows: list[dict[str, Any]]) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file.getvalue()


def test_rows_of_parquet_are_pictures_in_class_folders(
    pictures: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = sync("hf://datasets/owner/pets", tmp_path, QUICK)
    files = content(result.path)
    assert sorted(files) == PICTURES
    for name, body in files.items():
        shard, _, row = Path(name).stem.rpartition("-")
        assert body == rows_of(f"{shard}.parquet")[int(row)]["image"]["bytes"]
    assert capsys.readouterr().out.count("1 row without a picture or class left out") == 1
    assert sync("hf://datasets/owner/pets", tmp_path, QUICK).unchanged
    assert not list((tmp_path / ".kfsync").glob("tmp*"))


def test_rows_that_are_added_leave_the_others_as_they_are(pictures: Hub, tmp_path: Path) -> None:
    """Without a picture or its bytes, a row is left out."""
    url = "hf://datasets/owner/pets"
    first = sync(url, tmp_path, QUICK)
    rows = rows_of("validation-00000-of-00001.parquet") + rows_of("train-00001-of-00002.parquet")
    rows += [{"image": None, "label": 0}, {"image": {"bytes": None, "path": "a.jpg"}, "label": 0}]
    pictures.files["data/validation-00000-of-00001.parquet"] = table(rows)
    for options in (replace(QUICK, dry_run=True), QUICK):
        second = sync(url, tmp_path, options)
        assert (len(second.changes.same), len(second.changes.added)) == (10, 3)
        assert second.digest != first.digest


def test_a_listing_of_parquet_reads_labels_alone(pictures: Hub) -> None:
    source = open_source("hf://datasets/owner/pets")
    listing = source.listing()
    assert listing.names == PICTURES
    assert not listing.sized
    stored = [path for path, _ in pictures.asked if "/stored/" in path]
    assert len(stored) == pictures.ranges > 0


def test_check_before_a_run_samples_rows_of_parquet(pictures: Hub) -> None:
    layout, few = sample("hf://datasets/owner/pets", QUICK, RULE)
    assert layout.classes == ("cat", "dog, big", "n%2Fa")
    expected = [rows_of("train-00000-of-00002.parquet")[0]["image"]["bytes"]]
    assert few[:1] == expected
    assert len(few) == 7


def test_parquet_files_stay_on_request_and_without_pictures(pictures: Hub, tmp_path: Path) -> None:
    options = SyncOptions(concurrency=2, timeout=5, label_column="none")
    asis = content(sync("hf://datasets/owner/pets", tmp_path / "asis", options).path)
    assert asis == pictures.files
    pictures.files = {"data/train.parquet": table([{"text": "a", "label": 1}])}
    texts = content(sync("hf://datasets/owner/pets", tmp_path / "texts", QUICK).path)
    assert texts == pictures.files


@pytest.mark.parametrize(
    ("name", "row", "column", "says"),
    [
        ("a/train.parquet", {}, "", "several configurations .a, data.: .*/pets/a$"),
        ("data/train.parquet", {"fine": 1, "coarse": 2}, "", "0 can be the class: give sync.label"),
        ("data/train.parquet", {"label": 1, "class": 2}, "", "2 can be the class"),
        ("data/train.parquet", {"label": 1}, "fine", "0 can be the class"),
    ],
)
def test_parquet_that_has_not_one_meaning_is_one_line(
    pictures: Hub, name: str, row: dict[str, int], column: str, says: str
) -> None:
    if row:
        pictures.files.clear()
    image = {"bytes": b"\xff\xd8\xff", "path": None}
    pictures.files[name] = table([{"image": image, **(row or {"label": 1})}])
    with pytest.raises(InputError, match=says):
        open_source("hf://datasets/owner/pets", SourceOptions(label_column=column)).listing()


def test_damaged_parquet_leaves_nothing(
    pictures: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kfp_ddp.storage.huggingface.Retry", lambda: RETRY)
    pictures.wrong = {"data/train-00001-of-00002.parquet"}
    with pytest.raises(StorageError, match=r"cannot read 'data/train-00001.*: SHA256"):
        sync("hf://datasets/owner/pets", tmp_path, QUICK)
    assert not list(tmp_path.rglob("*.png"))
    pictures.wrong.clear()
    assert sorted(content(sync("hf://datasets/owner/pets", tmp_path, QUICK).path)) == PICTURES
