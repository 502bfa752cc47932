"""What web servers and proxies do that a sync has to bear: chunks, logins, redirects, and worse."""

import base64
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.datasets.options import Options
from kfp_ddp.datasets.sync import sync
from tests.serving import RawServer, head, serving
from tests.sync_runs import RETRY, content, manifest

QUICK = Options(concurrency=2, timeout=5)
FILES = {"a/x": b"x" * 3000, "b": b"y" * 20}


def sized(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    return head(body, status, *headers) + body


def chunked(body: bytes, trailers: bytes = b"", size: int = 1000) -> bytes:
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    chunks = b"".join(b"%x;name=value\r\n%b\r\n" % (len(part), part) for part in parts)
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + chunks + b"0\r\n" + trailers + b"\r\n"


def fill(web: RawServer, answer: Callable[[bytes], bytes] = sized) -> None:
    """Serve the files and their manifest, each as `answer` makes a response of it."""
    web.answers = {f"/v/{name}": answer(body) for name, body in FILES.items()}
    web.answers["/v/_MANIFEST.jsonl"] = answer(manifest(FILES))


@pytest.fixture
def web() -> Iterator[RawServer]:
    server = RawServer()
    fill(server)
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
    return content(sync(url, target, QUICK, retry=RETRY).path)


def interim(body: bytes) -> bytes:
    hints = b"HTTP/1.1 103 Early Hints\r\nLink: </x>; rel=preload\r\nContent-Length: 7\r\n\r\n"
    return b"HTTP/1.1 100 Continue\r\n\r\n" + hints + sized(body)


def trailed(body: bytes) -> bytes:
    return chunked(body, b"Digest: x\r\nServer-Timing: 0\r\n")


@pytest.mark.parametrize("answer", [sized, chunked, interim, trailed])
def test_every_form_is_taken(
    web: RawServer, tmp_path: Path, answer: Callable[[bytes], bytes]
) -> None:
    fill(web, answer)
    assert bring(address(web), tmp_path) == FILES
    assert len(web.seen) == 3, "each asked for once"


def test_chunked_body_needs_no_more_memory_than_some_blocks(web: RawServer, tmp_path: Path) -> None:
    body = bytes(32 << 20)
    web.answers["/v/_MANIFEST.jsonl"] = sized(manifest({"big": body}))
    web.answers["/v/big"] = chunked(body, size=8 << 20)
    tracemalloc.start()
    try:
        version = sync(address(web), tmp_path, QUICK, retry=RETRY).path
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
    assert {(h["host"], h["authorization"]) for _, h in web.seen} == {(host, login)}
    for text, line in (("machine", "line 1 is wrong"), (None, "No such file")):
        (tmp_path / "netrc").unlink() if text is None else (tmp_path / "netrc").write_text(text)
        with pytest.raises(InputError, match=f"^cannot read the netrc file [^\n]*{line}[^\n]*$"):
            bring(address(web), tmp_path / "target")


def test_plain_http_from_elsewhere_is_told_once(web: RawServer, tmp_path: Path) -> None:
    for host, times in (("0.0.0.0", 1), ("127.0.0.1", 0)):
        told: list[str] = []

        def watch(phase: str, *_: object, told: list[str] = told) -> None:
            told.append(phase)

        url = address(web).replace("127.0.0.1", host)
        sync(url, tmp_path / host, QUICK, watch, RETRY)
        notice = f"{url} comes over plain http://, so it can be read and changed on the way"
        assert told.count(notice) == times


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
def test_answers_without_measure_are_one_line(
    web: RawServer, tmp_path: Path, answer: bytes, message: str
) -> None:
    web.answers["/v/b"] = answer
    with pytest.raises(StorageError, match=f"^cannot read 'b' of [^\n]*{message}[^\n]*$"):
        bring(address(web), tmp_path)
