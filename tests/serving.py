"""Servers that run for the length of a block, and ports for those of others."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from socketserver import TCPServer


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
    """A port of the loopback interface that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port
