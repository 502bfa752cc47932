"""Servers that list objects in the form of each store, and answer as a test needs it."""

import hashlib
import json
from collections.abc import Callable, Sequence
from http.server import ThreadingHTTPServer
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest

from tests.serving import Handler

TAG = hashlib.md5(b"abc", usedforsecurity=False).hexdigest()
NAMES = [f"x/{number}" for number in range(5)]
COMMIT = "a" * 40
Reply = tuple[int, bytes, dict[str, str]]


class Server(ThreadingHTTPServer):
    """Answers every request as a function of method and path says."""

    daemon_threads = True

    def __init__(self, reply: Callable[[str, str], Reply]) -> None:
        self.reply = reply
        super().__init__(("127.0.0.1", 0), Visit)


class Visit(Handler):
    server: Server
    protocol_version = "HTTP/1.1"

    def visit(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        status, body, headers = self.server.reply(self.command, self.path)
        self.answer(status, body, **headers)

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = visit


def use(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Point the settings of every store to a server."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("HF_ENDPOINT", url)
    monkeypatch.setenv("HF_TOKEN", "test")
    monkeypatch.setenv(
        "AZURE_STORAGE_CONNECTION_STRING", f"AccountName=a;AccountKey=a2V5;BlobEndpoint={url}/a"
    )


def listed(scheme: str, names: Sequence[str], token: str = "") -> bytes:
    """Return a page of objects of three bytes, in the form of a protocol."""
    if scheme == "hf":
        oid = {"type": "file", "oid": COMMIT}
        return json.dumps([{"path": name, "size": 3} | oid for name in names]).encode()
    if scheme == "gs":
        items = [{"name": name, "size": "3", "crc32c": "Nks/tw=="} for name in names]
        return json.dumps({"items": items, **({"nextPageToken": token} if token else {})}).encode()
    if scheme == "s3":
        text = "".join(
            f"<Contents><Key>{escape(name)}</Key><Size>3</Size><ETag>{TAG}</ETag></Contents>"
            for name in names
        )
        text += f"<NextContinuationToken>{token}</NextContinuationToken>" if token else ""
        text += f"<IsTruncated>{str(bool(token)).lower()}</IsTruncated>"
        return f"<ListBucketResult>{text}</ListBucketResult>".encode()
    blobs = "".join(
        f"<Blob><Name>{name}</Name><Properties><Content-Length>3</Content-Length>"
        f"<Etag>{TAG}</Etag><BlobType>BlockBlob</BlobType></Properties></Blob>"
        for name in names
    )
    marker = f"<NextMarker>{token}</NextMarker>"
    return f"<EnumerationResults><Blobs>{blobs}</Blobs>{marker}</EnumerationResults>".encode()


def page(scheme: str, path: str) -> bytes:
    """Return the page of two of `NAMES`, or as many as are asked for."""
    query = parse_qs(urlsplit(path).query)
    token, size = {
        "gs": ("pageToken", "maxResults"),
        "s3": ("continuation-token", "max-keys"),
        "az": ("marker", "maxresults"),
    }[scheme]
    start = int(query.get(token, ["0"])[0])
    end = start + min(2, int(query.get(size, ["2"])[0]))
    return listed(scheme, NAMES[start:end], str(end) if end < len(NAMES) else "")


def aws(names: Sequence[str], encode: Callable[[str], str] | None) -> Server:
    """Return an S3 server with objects `abc`, which encodes their names as asked by the SDK."""

    def reply(_: str, path: str) -> Reply:
        if "list-type=2" not in path:
            known = unquote(urlsplit(path).path).removeprefix("/bucket/") in names
            return 200 if known else 404, b"abc" if known else b"", {"ETag": f'"{TAG}"'}
        if encode is None:
            return 200, listed("s3", names), {}
        assert "encoding-type=url" in path
        kind = b"<EncodingType>url</EncodingType></ListBucketResult>"
        text = listed("s3", [encode(name) for name in names])
        return 200, text.replace(b"</ListBucketResult>", kind), {}

    return Server(reply)


def as_java(name: str) -> str:
    """Encode as java.net.URLEncoder, and so as AWS."""
    return quote(name, safe="/*-_. ").replace("~", "%7E").replace(" ", "+")
