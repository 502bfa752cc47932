"""Keep-alive HTTP for many small bodies: http.client's sockets and TLS, lean answers."""

import functools
import http.client
import re
import socket
import ssl
import urllib.request
from typing import BinaryIO, cast
from urllib.parse import urlsplit

_LINE = 65536
_LINES = 256
_STATUS = re.compile(rb"HTTP/1\.([01]) (\d{3})\b")
_BUFFER = 65536


class Response:
    """An answer: its head, taken apart by hand, and its body, to be read from `file`.

    http.client parses headers as e-mail and opens a file for each answer, which together cost
    more than half of the processor time of a small file. `length` is how much of the body is
    left, None when only its end will tell.

    Raises:
        http.client.HTTPException: this is not an answer in HTTP/1.
    """

    def __init__(self, head: bytes, file: BinaryIO) -> None:
        self.file = file
        match = _STATUS.match(head)
        if match is None:
            raise http.client.BadStatusLine(repr(head[:80]))
        self.version, self.status = 10 + int(match[1]), int(match[2])
        fields = head.lower()
        self.chunked = _field(fields, b"transfer-encoding") == b"chunked"
        length = _field(fields, b"content-length")
        self.length = int(length) if length.isdigit() and not self.chunked else None
        wish = _field(fields, b"connection")
        self.keeps = wish != b"close" and (self.version == 11 or wish == b"keep-alive")

    @classmethod
    def receive(cls, file: BinaryIO) -> "Response":
        """Read a head from a connection.

        Raises:
            OSError, http.client.HTTPException: the connection failed, or ended early.
        """
        lines = [file.readline(_LINE)]
        if not lines[0]:
            raise http.client.RemoteDisconnected("connection closed without an answer")
        while lines[-1] not in (b"\r\n", b"\n"):
            lines.append(file.readline(_LINE))
            if not lines[-1]:
                raise http.client.RemoteDisconnected("connection closed within the head")
            if len(lines) > _LINES:
                raise http.client.HTTPException("endless head")
        return cls(b"".join(lines), file)

    def read(self, size: int = -1, /) -> bytes:
        """Up to `size` bytes of the body, all that is left when negative; b'' at its end.

        Raises:
            OSError, http.client.HTTPException: the connection failed, or ended early.
        """
        if self.chunked:
            return self._chunks()
        if self.length is None:
            data = self.file.read(size)
            if size < 0 or not data:
                self.length, self.keeps = 0, False
            return data
        wanted = self.length if size < 0 else min(size, self.length)
        data = self.file.read(wanted) if wanted else b""
        self.length -= len(data)
        if not data and wanted:
            raise http.client.IncompleteRead(b"", wanted)
        return data

    def _chunks(self) -> bytes:
        """All chunks at once: only listings and errors come in chunks."""
        parts = []
        while size := int(self.file.readline(_LINE).split(b";")[0] or b"x", 16):
            parts.append(self.file.read(size))
            if len(parts[-1]) < size or self.file.readline(_LINE) != b"\r\n":
                raise http.client.IncompleteRead(b"", size)
        while self.file.readline(_LINE) not in (b"\r\n", b"\n", b""):
            pass
        self.chunked, self.length = False, 0
        return b"".join(parts)


def _field(head: bytes, name: bytes) -> bytes:
    """The value of a header in a head of lower case; b'' if it is not there."""
    start = head.find(b"\n" + name + b":")
    if start < 0:
        return b""
    start += len(name) + 2
    return head[start : head.find(b"\n", start)].strip()


@functools.cache
def _context() -> ssl.SSLContext:
    """One for all connections, as loading the authorities takes 20 ms."""
    return ssl.create_default_context()


class Endpoint:
    """Where a server is, and how to get there: its address, TLS, the environment's proxy.

    `SSL_CERT_FILE` names further authorities.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.secure = parts.scheme == "https"
        self.name = parts.netloc
        self.host, self.port = parts.hostname or "", parts.port or (443 if self.secure else 80)
        proxy = urllib.request.getproxies().get(parts.scheme, "")
        self._proxy = "" if urllib.request.proxy_bypass(self.name) else proxy

    @property
    def proxied(self) -> bool:
        """Whether the environment names a proxy for this host."""
        return bool(self._proxy)

    def question(self, target: str, headers: bytes) -> bytes:
        """The bytes of a GET; `headers` are complete lines, each with its CRLF.

        Raises:
            ValueError: the target is not ASCII.
        """
        return b"GET %b HTTP/1.1\r\nHost: %b\r\n%b\r\n" % (
            target.encode("ascii"),
            self.name.encode("ascii"),
            headers,
        )

    def context(self) -> ssl.SSLContext:
        """How to speak TLS."""
        return _context()

    def dial(self, timeout: float) -> http.client.HTTPConnection:
        """Connect, through the proxy if there is one; without TLS.

        Raises:
            OSError: nobody is there, or the proxy refuses.
        """
        if self._proxy:
            via = urlsplit(self._proxy if "//" in self._proxy else f"//{self._proxy}")
            stdlib = http.client.HTTPConnection(via.hostname or "", via.port or 80, timeout=timeout)
            stdlib.set_tunnel(self.host, self.port)
        else:
            stdlib = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        stdlib.connect()
        stdlib.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return stdlib


class Connection:
    """One connection to one host, opened when first used and again after a failure.

    Used by one thread. `timeout` is the longest silence of the peer, in seconds.
    """

    def __init__(self, endpoint: str, timeout: float) -> None:
        self._endpoint, self._timeout = Endpoint(endpoint), timeout
        self._socket: socket.socket | None = None
        self._file: BinaryIO | None = None
        self._response: Response | None = None

    def get(self, target: str, headers: bytes = b"") -> Response:
        """Send GET and read the answer's head; the body is the caller's to read whole.

        `headers` are complete lines, each with its CRLF. An answer not read to its end makes
        the next call open a new connection.

        Raises:
            OSError, http.client.HTTPException: the connection failed; `close` was called.
        """
        previous, self._response = self._response, None
        if previous is not None and not (previous.keeps and previous.length == 0):
            self.close()
        try:
            if self._socket is None:
                self._socket = self._open()
                self._file = cast(BinaryIO, self._socket.makefile("rb", _BUFFER))
            self._socket.sendall(self._endpoint.question(target, headers))
            assert self._file is not None
            self._response = response = Response.receive(self._file)
        except ValueError as error:
            self.close()
            raise http.client.HTTPException(str(error)) from error
        except BaseException:
            self.close()
            raise
        return response

    def close(self) -> None:
        """Close the socket, if any."""
        self._response = None
        if self._file is not None:
            self._file.close()
        if self._socket is not None:
            self._socket.close()
        self._socket = self._file = None

    def _open(self) -> socket.socket:
        plain = self._endpoint.dial(self._timeout).sock
        if not self._endpoint.secure:
            return plain
        try:
            return self._endpoint.context().wrap_socket(plain, server_hostname=self._endpoint.host)
        except BaseException:
            plain.close()
            raise
