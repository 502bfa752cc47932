"""Servers that run for the length of a block, and ports for those of others."""

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler
from socketserver import TCPServer

_FIRST = 12_000 + 1_000 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_PORTS = iter(range(_FIRST, _FIRST + 1_000))


class Handler(BaseHTTPRequestHandler):
    """Answers without a log."""

    def log_message(self, *args: object) -> None:
        """Log nothing."""

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        """Send a whole answer; `_` in the name of a header is a hyphen."""
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class Files(SimpleHTTPRequestHandler):
    """Serves the files of a folder without a log."""

    def log_message(self, *args: object) -> None:
        """Log nothing."""


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


def free_port() -> int:
    """A port of the loopback interface that nothing listens on, not returned before.

    The system never picks it for another socket, as it may pick a port that was free a moment ago:
    that range starts at 32768 on Linux. Workers of pytest-xdist have ranges of their own.
    """
    for port in _PORTS:
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("this worker has used all of its ports")
