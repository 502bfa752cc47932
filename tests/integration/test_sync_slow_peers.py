"""Peers that send a byte now and then, so that no silence is ever too long."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kfp_ddp.core.errors import StorageError
from kfp_ddp.datasets.options import Options
from kfp_ddp.datasets.sync import sync
from kfp_ddp.datasets.transfer import PROGRESS, SMALL
from kfp_ddp.storage.http import origin
from kfp_ddp.storage.http.answer import LOWEST_SPEED, Pace
from kfp_ddp.storage.source import Retry
from tests import tls
from tests.serving import RawServer, head, serving
from tests.sync_runs import content, manifest

QUICK = Options(concurrency=2, timeout=1)
RETRY = Retry(attempts=2, pause=0.01, longest=0.02)
SMALL_BODY, LARGE_BODY = bytes(20_000), bytes(3 * SMALL)


@pytest.fixture
def peer() -> Iterator[RawServer]:
    server = RawServer()
    with serving(server):
        yield server
        server.stopped = True


@pytest.fixture
def secure_peer(
    peer: RawServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RawServer]:
    """The same over TLS, with a certificate that we trust."""
    certificate = tls.loopback_certificate(tmp_path)
    peer.secure = tls.server_context(certificate)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    origin.tls.cache_clear()
    yield peer
    origin.tls.cache_clear()


def serve(peer: RawServer, body: bytes, at_once: bytes, rest: bytes) -> str:
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
def test_peer_that_drips_is_given_up(
    request: pytest.FixtureRequest, tmp_path: Path, drip: str, fixture: str
) -> None:
    url = serve(request.getfixturevalue(fixture), *DRIPS[drip])
    with pytest.raises(StorageError, match=r"^cannot read 'x' of [^\n]*less than 1000 bytes a sec"):
        sync(url, tmp_path / "target", QUICK, retry=RETRY)


@pytest.mark.parametrize("body", [SMALL_BODY, LARGE_BODY], ids=["small", "large"])
def test_slow_peer_is_waited_for(secure_peer: RawServer, tmp_path: Path, body: bytes) -> None:
    secure_peer.step = len(body) // 30
    url = serve(secure_peer, body, head(body), body)
    assert content(sync(url, tmp_path / "target", QUICK, retry=RETRY).path) == {"x": body}


def test_breaks_after_a_few_bytes_each_come_to_an_end(peer: RawServer, tmp_path: Path) -> None:
    """A range of some bytes an answer would bring 3 MB in as many requests."""
    url = serve(peer, LARGE_BODY, b"", b"")

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
        sync(url, tmp_path / "target", QUICK, retry=RETRY)
    assert brief.asked <= 2 * RETRY.attempts**2


def test_pace_counts_waiting_alone_and_each_period_anew() -> None:
    pace = Pace(10)
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
