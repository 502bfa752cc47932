"""Servers that run for the length of a block, and ports for those of others."""

import contextlib
import json
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import (
    BaseHTTPRequestHandler,
    HTTPServer,
    SimpleHTTPRequestHandler,
    ThreadingHTTPServer,
)
from socketserver import StreamRequestHandler, TCPServer, ThreadingTCPServer
from typing import Any

_FIRST = 12_000 + 1_000 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_PORTS = iter(range(_FIRST, _FIRST + 1_000))


class Handler(BaseHTTPRequestHandler):
    """Answers without a log."""

    disable_nagle_algorithm = True  # a body would wait for the client's delayed ACK, 40 ms

    def log_message(self, *args: object) -> None:
        """Log nothing."""

    def answer(self, status: int, content: object = b"", **headers: str) -> None:
        """Send a whole answer, as JSON if it is not bytes; `_` in a header's name is a hyphen."""
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        if body is not content:
            headers = {"Content_Type": "application/json", **headers}
        self.send_response(status)
        for name, value in {"Content_Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


Fault = Callable[[Any, Any], bool | None]
"""Called with a request's handler and the server; answers in its place, or returns True."""


@dataclass(kw_only=True)
class Faulty:
    """A server that checks its requests, and fails for some of them."""

    url: str = ""
    token: str = ""
    """The token that requests must bear; '' for none."""
    violations: list[str] = field(default_factory=list)
    closing: threading.Event = field(default_factory=threading.Event)
    _faults: list[tuple[str, Fault, int]] = field(default_factory=list)

    def fail(self, operation: str, fault: Fault, times: int = 1_000_000) -> None:
        """Let requests for an operation, or any for '*', meet a fault."""
        self._faults.append((operation, fault, times))

    def heal(self) -> None:
        """Remove all faults."""
        self._faults.clear()

    def fault(self, operation: str) -> Fault | None:
        """Return the fault of the next request for an operation."""
        for at, (name, fault, times) in enumerate(self._faults):
            if name in (operation, "*") and times > 0:
                self._faults[at] = (name, fault, times - 1)
                return fault
        return None

    @contextlib.contextmanager
    def serve(self, handler: type[Handler], listen: tuple[str, int]) -> Iterator[None]:
        """Answer by a handler, which has this server as `stand_in`, until the block ends."""
        http = ThreadingHTTPServer(listen, type("Bound", (handler,), {"stand_in": self}))
        http.block_on_close = False  # a kept connection ends with its client
        with serving(http) as self.url:
            try:
                yield
            finally:
                self.closing.set()


class Files(SimpleHTTPRequestHandler):
    """Serves the files of a folder without a log."""

    def log_message(self, *args: object) -> None:
        """Log nothing."""


class Recorder(HTTPServer):
    """Records requests; answers with the next of `answers`, a status and a location, then 200."""

    def __init__(self, *answers: tuple[int, str]) -> None:
        self.answers = list(answers)
        self.seen: list[tuple[str, str, bytes]] = []
        """Path, header Authorization and body of each."""
        super().__init__(("127.0.0.1", 0), _RecorderHandler)


class _RecorderHandler(Handler):
    server: Recorder

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.seen.append((self.path, self.headers["Authorization"], body))
        status, location = self.server.answers.pop(0) if self.server.answers else (200, "")
        self.answer(status, Location=location)

    do_GET = do_POST


def head(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    """Return the head of a response with this body."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


class RawServer(ThreadingTCPServer):
    """Sends the bytes that are set for a path, right or wrong, and records the requests."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        self.answers: dict[str, bytes | tuple[bytes, bytes]] = {}
        """A response by path; of two parts the second is sent in pieces of `step` bytes."""
        self.step, self.stopped = 1, False
        self.seen: list[tuple[str, dict[str, str]]] = []
        """Paths and headers of the requests."""
        self.secure: ssl.SSLContext | None = None
        super().__init__(("127.0.0.1", 0), _RawHandler)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that give up, which is the subject of some tests."""


class _RawHandler(StreamRequestHandler):
    server: RawServer
    disable_nagle_algorithm = True

    def setup(self) -> None:
        if self.server.secure is not None:
            self.request = self.server.secure.wrap_socket(self.request, server_side=True)
        super().setup()

    def finish(self) -> None:
        super().finish()
        self.request.close()

    def handle(self) -> None:
        server = self.server
        while line := self.rfile.readline():
            path = line.split()[1].decode()
            headers = {}
            while field := self.rfile.readline().decode().strip():
                name, _, value = field.partition(": ")
                headers[name.lower()] = value
            server.seen.append((path, headers))
            answer = server.answers[path] if path in server.answers else head(b"", "404 Not Found")
            at_once, rest = answer if isinstance(answer, tuple) else (answer, b"")
            self.connection.sendall(at_once)
            for at in range(0, len(rest), server.step):
                if server.stopped:
                    return
                time.sleep(0.05)
                self.connection.sendall(rest[at : at + server.step])


@contextlib.contextmanager
def serving(server: TCPServer) -> Iterator[str]:
    """Answer on the server's port until the block ends; yields the URL."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def serving_by(handler: Callable[..., Any]) -> contextlib.AbstractContextManager[str]:
    """The same for a server of HTTP by this handler."""
    return serving(ThreadingHTTPServer(("127.0.0.1", 0), handler))


def free_port() -> int:
    """A port of the loopback interface that nothing listens on, not returned before.

    The system never picks it for another socket, as it may pick a port that was free a moment ago:
    that range starts at 32768 on Linux. Workers of pytest-xdist have ranges of their own.
    """
    for port in _PORTS:
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("this worker has used all of its ports")
