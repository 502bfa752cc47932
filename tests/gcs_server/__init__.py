"""A bucket that speaks the GCS JSON API and breaks on demand: pages, generations, faults."""

import base64
import contextlib
import hashlib
import itertools
import json
import socket
import ssl
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import parse_qsl, unquote, urlsplit

import google_crc32c

from tests import serving

PAGE = 1000


@dataclass
class Stored:
    """One object as the bucket holds it."""

    data: bytes
    generation: int
    crc: str
    md5: str
    """Empty for a composite object."""


class Bucket:
    """What is served, which faults are queued, and what was asked.

    Faults of an object are used up one a request: an HTTP status, or reset0 (before the head),
    reset and fin (in the middle of the body), shortlen, corrupt, corrupt-range (only in answers
    to a Range), nohash, stall, replaced (the object changes just before the answer), nonsense (no
    HTTP), chunked, unsized (no length at all), excess (another answer that nobody asked for),
    endless, endless-large, endless-small (a body without an end, whose length is not given, is
    given as a large one, or is that of the object).
    """

    def __init__(self) -> None:
        self.objects: dict[str, Stored] = {}
        self.faults: dict[str, deque[str]] = defaultdict(deque)
        self.list_faults: deque[str] = deque()
        self.page = PAGE
        self.token = ""
        self.tokens_given = 0
        self.deny_tokens = False
        self.token_faults: deque[str] = deque()
        self.refusal = b""
        """The body of an answer that is an error, where it should be another one."""
        self.writes: list[str] = []
        self.write_fault = ""
        """What happens to each write from number `write_fault_after`: forbidden, race, damage."""
        self.write_fault_after = 0
        self.before_write: Callable[[], None] | None = None
        """Called between a reading and a writing, as another writer."""
        self.lose_answers = 0
        """Number of writes that are done and answered by an error."""
        self.sent = 0
        """Bytes of endless bodies."""
        self.lock = threading.RLock()
        self.lists = 0
        self.gets: list[str] = []
        self.delay = 0.0
        self.connections = self.at_once = self.most_at_once = 0
        self._generations = itertools.count(1_700_000_000_000_000)

    def joined(self, change: int) -> None:
        """A client connected (1) or left (-1)."""
        with self.lock:
            self.connections += change > 0
            self.at_once += change
            self.most_at_once = max(self.most_at_once, self.at_once)

    def put(self, name: str, data: bytes, *, composite: bool = False) -> None:
        """Write an object, as a new generation."""
        with self.lock:
            crc = base64.b64encode(google_crc32c.value(data).to_bytes(4, "big")).decode()
            md5 = base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
            generation = next(self._generations)
            self.objects[name] = Stored(data, generation, crc, "" if composite else md5)

    def put_all(self, objects: dict[str, bytes]) -> None:
        """Write objects below `ds/`."""
        for name, data in objects.items():
            self.put(f"ds/{name}", data)

    def write(self, name: str, match: str, data: bytes) -> tuple[int, dict[str, Any]]:
        """Return status and answer of an upload; `match` is the generation to replace, or ''."""
        with self.lock:
            if self.before_write:
                self.before_write()
            fault = self.write_fault if len(self.writes) >= self.write_fault_after else ""
            if fault == "race":
                self.put(name, b"another writer")
            elif fault == "forbidden":
                return 403, {"error": {"message": "no storage.objects.create access"}}
            elif fault == "damage":
                data = data[:-1] + b"?"
            if match and not self.matches(name, match):
                return 412, {"error": {"message": "conditionNotMet"}}
            self.writes.append(name)
            self.put(name, data)
            if self.lose_answers:
                self.lose_answers -= 1
                return 503, {"error": {"message": "backendError"}}
            return 200, properties(name, self.objects[name])

    def matches(self, name: str, generation: str) -> bool:
        """Return whether an object has this generation; a missing object has 0."""
        stored = self.objects.get(name)
        return generation == str(stored.generation if stored else 0)

    def fault(self, name: str, *faults: str) -> None:
        """Queue faults for the next requests of an object."""
        self.faults[name].extend(faults)

    def next_fault(self, name: str) -> str:
        """Take the fault for this request; '' for none."""
        with self.lock:
            self.gets.append(name)
            queue = self.faults.get(name)
            return queue.popleft() if queue else ""

    def list_fault(self) -> str:
        """Take the fault for this page: a status, reset0, endless, or its text; '' for none."""
        return self.list_faults.popleft() if self.list_faults else ""


class Handler(serving.Handler):
    """The JSON API: list, media download, and a token endpoint."""

    protocol_version = "HTTP/1.1"
    bucket: ClassVar[Bucket]
    sessions: ClassVar[list[tuple[str, str]]]
    """Name and generation to replace, of each upload in several requests."""
    timeout = 60

    def handle(self) -> None:
        """Serve the connection; a client that goes away is no news."""
        self.bucket.joined(1)
        with contextlib.suppress(ConnectionError, TimeoutError):
            super().handle()
        self.bucket.joined(-1)

    def finish(self) -> None:
        """Close the streams, whatever the client did."""
        with contextlib.suppress(OSError):
            super().finish()

    def do_POST(self) -> None:
        """Take a small object, or give a token."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path.startswith("/upload/"):
            self.upload(body)
            return
        if self.bucket.token_faults:
            fault = self.bucket.token_faults.popleft()
            if fault == "reset0":
                self.reset()
            else:
                self.error(HTTPStatus(int(fault)))
            return
        if self.bucket.deny_tokens:
            self.answer(HTTPStatus.BAD_REQUEST, {"error": "invalid_grant"})
            return
        self.bucket.tokens_given += 1
        self.bucket.token = f"token-{self.bucket.tokens_given}"
        tokens = dict.fromkeys(("access_token", "id_token"), self.bucket.token)
        self.answer(HTTPStatus.OK, tokens | {"expires_in": 3600})

    def upload(self, body: bytes) -> None:
        """Store what comes with its name in one body of parts, or begin an upload by do_PUT."""
        parts = urlsplit(self.path)
        query = dict(parse_qsl(parts.query))
        match = query.get("ifGenerationMatch", "")
        if parts.path != "/upload/storage/v1/b/bucket/o":
            self.error(HTTPStatus.NOT_FOUND)
        elif query["uploadType"] == "resumable":
            self.sessions.append((json.loads(body)["name"], match))
            session = f"http://{self.headers['Host']}/session/{len(self.sessions) - 1}"
            self.answer(HTTPStatus.OK, b"{}", Location=session)
        else:
            _, about, content, _ = body.split(body.partition(b"\r\n")[0])
            name = json.loads(about.partition(b"\r\n\r\n")[2])["name"]
            data = content.partition(b"\r\n\r\n")[2].removesuffix(b"\r\n")
            self.answer(*self.bucket.write(name, match, data))

    def do_PUT(self) -> None:
        """Take the content of an upload."""
        name, match = self.sessions[int(self.path.rpartition("/")[2])]
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(*self.bucket.write(name, match, body))

    def do_DELETE(self) -> None:
        """Drop an object."""
        self.bucket.objects.pop(unquote(urlsplit(self.path).path.partition("/o/")[2]), None)
        self.answer(HTTPStatus.OK, {})

    def do_GET(self) -> None:
        """List or download."""
        parts = urlsplit(self.path)
        query = dict(parse_qsl(parts.query))
        time.sleep(self.bucket.delay)
        wanted = self.bucket.token
        if wanted and self.headers.get("Authorization") != f"Bearer {wanted}":
            self.error(HTTPStatus.UNAUTHORIZED)
            return
        path = parts.path.removeprefix("/download").removeprefix("/storage/v1/b/")
        name, _, rest = path.partition("/o")
        if name != "bucket":
            self.error(HTTPStatus.NOT_FOUND)
        elif not rest:
            self.list(query)
        else:
            self.media(unquote(rest[1:], errors="surrogateescape"), query)

    def list(self, query: dict[str, str]) -> None:
        """One page of the names with the prefix, after the page token."""
        bucket = self.bucket
        bucket.lists += 1
        if fault := bucket.list_fault():
            if fault == "reset0":
                self.reset()
            elif fault == "endless":
                self.send_response(HTTPStatus.OK)
                self.send_header("Content-Length", str(1 << 40))
                self.end_headers()
            elif fault.isdigit():
                self.error(HTTPStatus(int(fault)))
            else:
                self.answer(HTTPStatus.OK, fault.encode())
            return
        after = unquote(query.get("pageToken", ""))
        names = sorted(n for n in bucket.objects if n.startswith(query.get("prefix", "")))
        names = [n for n in names if n > after]
        size = min(bucket.page, int(query.get("maxResults", PAGE)))
        page: dict[str, object] = {
            "items": [properties(n, bucket.objects[n]) for n in names[:size]]
        }
        if len(names) > size:
            page["nextPageToken"] = names[size - 1]
        self.answer(HTTPStatus.OK, page)

    def media(self, name: str, query: dict[str, str]) -> None:
        """An object's bytes, or the fault that is next for it."""
        bucket = self.bucket
        fault = bucket.next_fault(name)
        if fault == "replaced":
            bucket.put(name, bucket.objects[name].data + b"!")
        stored = bucket.objects.get(name)
        if stored is None or query.get("generation", "") not in ("", str(stored.generation)):
            self.error(HTTPStatus.NOT_FOUND)
        elif (match := query.get("ifGenerationMatch", "")) and not bucket.matches(name, match):
            self.error(HTTPStatus.PRECONDITION_FAILED)
        elif fault == "reset0":
            self.reset()
        elif fault.isdigit():
            self.error(HTTPStatus(int(fault)))
        elif query.get("alt") != "media":
            self.answer(HTTPStatus.OK, properties(name, stored))
        else:
            self.body(stored, fault)

    def body(self, stored: Stored, fault: str) -> None:
        """Send the body, whole or broken."""
        ranged = self.headers.get("Range", "")
        start = int(ranged.removeprefix("bytes=").rstrip("-")) if ranged else 0
        data = stored.data[start:]
        if fault == "corrupt" or (fault == "corrupt-range" and ranged):
            data = data[:-1] + bytes([data[-1] ^ 0x40])
        cut = len(data) // 2
        length = cut if fault == "shortlen" else len(data)
        if fault == "nonsense":
            self.wfile.write(b"SSH-2.0-OpenSSH_9.9\r\n\r\n")
            self.close_connection = True
            return
        self.send_response(HTTPStatus.PARTIAL_CONTENT if ranged else HTTPStatus.OK)
        if fault.startswith("endless"):
            self.endless(stored, fault)
            return
        if fault in ("unsized", "chunked"):
            self.unsized(data, chunked=fault == "chunked")
            return
        if ranged:
            end = len(stored.data)
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{end}")
        if fault != "nohash":
            self.send_header("X-Goog-Hash", f"crc32c={stored.crc}")
        self.send_header("Content-Length", str(length))
        self.end_headers()
        broken = fault in ("reset", "fin", "stall", "shortlen")
        self.wfile.write(data[:cut] if broken else data)
        if fault == "excess":
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nbad")
        self.wfile.flush()
        if fault == "reset":
            time.sleep(0.05)
            self.reset()
        elif fault == "fin":
            self.close_connection = True
        elif fault == "stall":
            time.sleep(30)
            self.close_connection = True

    def unsized(self, data: bytes, chunked: bool) -> None:
        """A body without a length: in chunks, or to the end of the connection."""
        if chunked:
            self.send_header("Transfer-Encoding", "chunked")
            half = len(data) // 2
            data = b"".join(
                b"%x\r\n%b\r\n" % (len(part), part) for part in (data[:half], data[half:], b"")
            )
        else:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)

    def endless(self, stored: Stored, fault: str) -> None:
        """A body that ends with the connection of the client."""
        length = {"endless-large": 1 << 40, "endless-small": len(stored.data)}.get(fault)
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.send_header("X-Goog-Hash", f"crc32c={stored.crc}")
        self.end_headers()
        self.wfile.write(stored.data)
        self.close_connection = True
        with contextlib.suppress(OSError):
            while True:
                self.bucket.sent += self.wfile.write(bytes(1 << 16))

    def reset(self) -> None:
        """Cut the connection with RST."""
        linger = struct.pack("ii", 1, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.close_connection = True
        self.connection.close()

    def error(self, status: HTTPStatus) -> None:
        """An error in the form of the JSON API."""
        usual = {"error": {"code": status, "message": status.phrase}}
        self.answer(status, self.bucket.refusal or usual)


def properties(name: str, stored: Stored) -> dict[str, str]:
    """Return an object's properties as the JSON API does, numbers as text."""
    return {
        "name": name,
        "size": str(len(stored.data)),
        "generation": str(stored.generation),
        "crc32c": stored.crc,
        **({"md5Hash": stored.md5} if stored.md5 else {}),
    }


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: object, client_address: object) -> None:
        """A broken connection is the point of these tests."""


@contextlib.contextmanager
def serve(bucket: Bucket, secure: ssl.SSLContext | None = None) -> Iterator[str]:
    """Serve the bucket, under the name `bucket`, on a loopback port; yields the URL."""
    handler = type("BoundHandler", (Handler,), {"bucket": bucket, "sessions": []})
    server = _Server(("127.0.0.1", 0), handler)
    if secure is not None:
        server.socket = secure.wrap_socket(server.socket, server_side=True)
    with serving.serving(server) as url:
        yield url if secure is None else url.replace("http:", "https:")
