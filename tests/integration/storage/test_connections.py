"""Connections of a sync: how many, how fast, and with what peers."""

import asyncio
import base64
import contextlib
import random
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.datasets.options import SyncOptions
from kfp_ddp.datasets.stage import FileStage
from kfp_ddp.datasets.sync import sync
from kfp_ddp.datasets.transfer import PROGRESS, SMALL
from kfp_ddp.storage.http import connection, origin
from kfp_ddp.storage.http.answer import LOWEST_SPEED, MinimumRate
from kfp_ddp.storage.source import Retry
from tests import tls
from tests.gcs_server import Bucket, serve
from tests.serving import RawServer, head, serving
from tests.sync_runs import content, manifest, run

BODIES = {
    "small": random.Random(2).randbytes(20_000),
    "several buffers": random.Random(3).randbytes(SMALL),
    "large": random.Random(1).randbytes(3 * SMALL + 500_000),
}
QUICK = SyncOptions(concurrency=2, timeout=1)
TWICE = Retry(attempts=2, pause=0.01, longest=0.02)
SMALL_BODY, LARGE_BODY = bytes(20_000), bytes(3 * SMALL)


@pytest.mark.parametrize("concurrency", [1, 3])
@pytest.mark.parametrize("fault", ["unsized", "chunked", "excess"])
def test_odd_answers_are_read(bucket: Bucket, tmp_path: Path, fault: str, concurrency: int) -> None:
    objects = BODIES | {str(number): bytes([number]) * 50 for number in range(9)}
    bucket.put_all(objects)
    for name in BODIES:
        bucket.fault(f"ds/{name}", fault)
    version = run(tmp_path, concurrency=concurrency).path
    assert content(version) == objects


@pytest.mark.parametrize("concurrency", [4, 20])
def test_connections_are_kept_and_opened_after_one_lookup_of_the_host(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, concurrency: int
) -> None:
    bucket.put_all({str(number): b"x" * 100 for number in range(60)})
    for number in range(4):
        bucket.put(f"ds/large-{number}", bytes([number]) * (SMALL + 1))
    bucket.delay = 0.01
    lookups, look_up = list[object](), socket.getaddrinfo

    def counted(*place: Any) -> Any:
        lookups.append(place)
        return look_up(*place)

    monkeypatch.setattr(socket, "getaddrinfo", counted)
    monkeypatch.setattr(connection, "_BELIEVED", 60.0)  # however slow this machine is
    connection._addresses.clear()
    run(tmp_path, concurrency=concurrency)
    assert bucket.most_at_once <= concurrency
    assert bucket.connections == 1 + concurrency, "one for the listing"
    assert len(lookups) == 1


def test_silent_address(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket.put_all({"a": b"x"})
    resolve = connection._resolve

    async def two(host: str, port: int) -> list[Any]:
        (first, *_) = await resolve(host, port)
        return [(*first[:4], (SILENT, port)), first]

    async def connect(self: Any, sock: socket.socket, address: Any) -> None:
        if address[0] == SILENT:
            await asyncio.sleep(60)
        await connected(self, sock, address)

    connected = asyncio.selector_events.BaseSelectorEventLoop.sock_connect
    monkeypatch.setattr(asyncio.selector_events.BaseSelectorEventLoop, "sock_connect", connect)
    monkeypatch.setattr(connection, "_resolve", two)
    monkeypatch.setattr(connection, "_CONNECT", 0.4)
    assert run(tmp_path).retries == 0


SILENT = "192.0.2.1"  # of no host, by RFC 5737
FILES = {f"{number:02}": bytes([number]) * 20_000 for number in range(40)}
FILES |= {f"large-{number}": bytes([number]) * (SMALL + 5) for number in range(4)}


@pytest.mark.parametrize("tickets", [2, 0])
def test_tls_sessions_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tickets: int) -> None:
    bucket = Bucket()
    bucket.put_all(FILES)
    bucket.delay = 0.01
    with tls.trusted(tmp_path) as context:
        context.num_tickets = tickets
        with serve(bucket, context) as url:
            monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
            version = run(tmp_path / "target", concurrency=6).path
        sessions = origin.tls("").session_stats()
    assert content(version) == FILES
    assert sessions["connect_good"] > 4
    # The first connection has no session.
    assert sessions["hits"] == (sessions["connect_good"] - 1 if tickets else 0)


class Proxy(socketserver.ThreadingTCPServer):
    """Tunnels to whatever CONNECT names, and notes it; for those with the `login`, if set."""

    daemon_threads = True

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.login, self.version = "", b"1.1"
        super().__init__(("127.0.0.1", 0), Tunnel)


class Tunnel(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, Proxy)
        target = self.rfile.readline().split()[1].decode()
        self.server.asked.append(target)
        headers = b""
        while line := self.rfile.readline().strip():
            headers += line + b"\n"
        login = b"Basic " + base64.b64encode(self.server.login.encode())
        if self.server.login and b"Proxy-Authorization: " + login not in headers:
            self.wfile.write(b"HTTP/1.1 407 Who are you?\r\nContent-Length: 0\r\n\r\n")
            return
        host, _, port = target.partition(":")
        with socket.create_connection((host, int(port))) as far:
            version = self.server.version
            self.wfile.write(b"HTTP/%b 200 Connection established\r\n\r\n" % version)
            back = threading.Thread(target=self._pump, args=(far, self.connection))
            back.start()
            self._pump(self.connection, far)
            back.join()

    @staticmethod
    def _pump(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    server = Proxy()
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with serving(server) as url:
        monkeypatch.setenv("http_proxy", url)
        yield server


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
def test_proxy_is_used(bucket: Bucket, proxy: Proxy, tmp_path: Path, version: bytes) -> None:
    proxy.version = version
    bucket.put_all(BODIES)
    assert content(run(tmp_path).path) == BODIES
    assert len(proxy.asked) >= 3, "the listing, small ones, large ones"


def test_proxy_is_given_its_login(
    bucket: Bucket, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put_all(BODIES)
    proxy.login = "me:p@ss"
    with pytest.raises(InputError, match=r"^proxy 127.0.0.1:\d+ refuses us \(HTTP 407\)[^\n]*$"):
        run(tmp_path)
    port = proxy.server_address[1]
    monkeypatch.setenv("http_proxy", f"http://me:p%40ss@127.0.0.1:{port}")
    assert content(run(tmp_path).path) == BODIES


def test_writes_overlap(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that takes 5 ms for each file; no disk here is that slow on demand."""
    bodies = {f"{number:02}": bytes([number]) * 100 for number in range(60)}
    bucket.put_all(bodies)
    put, lock, writing, most = FileStage.put, threading.Lock(), [0], [0]

    def slow(self: FileStage, index: int, data: bytes, crc: int) -> None:
        with lock:
            writing[0] += 1
            most[0] = max(most[0], writing[0])
        time.sleep(0.005)
        put(self, index, data, crc)
        with lock:
            writing[0] -= 1

    monkeypatch.setattr(FileStage, "put", slow)
    version = run(tmp_path, concurrency=8).path
    assert most[0] > 2
    assert content(version) == bodies


@pytest.fixture
def peer() -> Iterator[RawServer]:
    server = RawServer()
    with serving(server):
        yield server
        server.stopped = True


@pytest.fixture
def secure_peer(peer: RawServer, tmp_path: Path) -> Iterator[RawServer]:
    """The same over TLS, with a certificate that we trust."""
    with tls.trusted(tmp_path) as peer.secure:
        yield peer


def address_of(peer: RawServer, body: bytes, at_once: bytes, rest: bytes) -> str:
    """Serve a manifest of one file, and its answer in these two parts; the manifest's address."""
    listed = manifest({"x": body})
    peer.answers = {"/m.jsonl": head(listed) + listed, "/x": (at_once, rest)}
    scheme = "https" if peer.secure else "http"
    return f"{scheme}://127.0.0.1:{peer.server_address[1]}/m.jsonl"


DRIPS = {
    "head": (SMALL_BODY, b"", b"HTTP/1.1 200 OK\r\nX: " + b"y" * 60_000),
    "small": (SMALL_BODY, head(SMALL_BODY), SMALL_BODY),
    "large": (LARGE_BODY, head(LARGE_BODY) + LARGE_BODY[: 2 * SMALL], LARGE_BODY[2 * SMALL :]),
    "trailers": (
        SMALL_BODY,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n"
        % (len(SMALL_BODY), SMALL_BODY),
        b"X: y\r\n" * 10_000,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drip", "fixture"),
    [*((drip, "peer") for drip in DRIPS), ("small", "secure_peer"), ("large", "secure_peer")],
)
def test_slow_peer(request: pytest.FixtureRequest, tmp_path: Path, drip: str, fixture: str) -> None:
    url = address_of(request.getfixturevalue(fixture), *DRIPS[drip])
    with pytest.raises(StorageError, match=r"^cannot read 'x' of [^\n]*less than 1000 bytes a sec"):
        sync(url, tmp_path / "target", QUICK, retry=TWICE)


@pytest.mark.parametrize("body", [SMALL_BODY, LARGE_BODY], ids=["small", "large"])
def test_slow_peer_is_waited_for(secure_peer: RawServer, tmp_path: Path, body: bytes) -> None:
    secure_peer.step = len(body) // 30
    url = address_of(secure_peer, body, head(body), body)
    assert content(sync(url, tmp_path / "target", QUICK, retry=TWICE).path) == {"x": body}


def test_breaks_after_a_few_bytes_each_come_to_an_end(peer: RawServer, tmp_path: Path) -> None:
    """A range of some bytes an answer would bring 3 MB in as many requests."""
    url = address_of(peer, LARGE_BODY, b"", b"")

    class Brief(dict[str, bytes | tuple[bytes, bytes]]):
        asked = 0

        def __getitem__(self, path: str) -> bytes | tuple[bytes, bytes]:
            if path != "/x":
                return super().__getitem__(path)
            self.asked += 1
            peer.stopped = True  # the connection ends with the answer
            part = LARGE_BODY[: SMALL + PROGRESS + self.asked * 10]
            return head(LARGE_BODY) + part, b"x"

    peer.answers = brief = Brief(peer.answers)
    with pytest.raises(StorageError, match=r"^cannot read 'x' of "):
        sync(url, tmp_path / "target", QUICK, retry=TWICE)
    assert brief.asked <= 2 * TWICE.attempts**2


def test_pace_counts_waiting_alone_and_each_period_anew() -> None:
    pace = MinimumRate(10)
    pace.waited(100)  # for the first byte: how long is another's matter
    pace.bytes += LOWEST_SPEED * 10
    pace.waited(9.9)
    pace.waited(0.1)
    pace.bytes += 10**9  # no credit for later
    pace.waited(10)
    pace.bytes += 1
    pace.waited(9)
    with pytest.raises(TimeoutError, match="less than 1000 bytes a second"):
        pace.waited(1)
