"""Keep-alive HTTP for many small bodies: http.client's sockets and TLS, lean answers."""

import http.client
import socket
import ssl
import urllib.request
from typing import BinaryIO, ClassVar, cast
from urllib.parse import urlsplit

_LINE = 65536
_BUFFER = 65536


class Response:
    """An answer: its head, split by hand, and its body, to be read whole.

    http.client parses headers as e-mail and opens a file for each answer, which together cost
    more than half of the processor time of a small file. `fields` maps lower-case names to
    values; `length` is how much of the body is left, None when only its end will tell.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.fields: dict[bytes, bytes] = {}
        self.status = self.version = 0
        while self.status in (0, http.HTTPStatus.CONTINUE):
            self._status_line()
            while (line := file.readline(_LINE)) not in (b"\r\n", b"\n"):
                if not line:
                    raise http.client.RemoteDisconnected("connection closed within the head")
                key, _, value = line.partition(b":")
                self.fields[key.strip().lower()] = value.strip()
        self._chunked = self.fields.get(b"transfer-encoding", b"").lower() == b"chunked"
        length = self.fields.get(b"content-length", b"")
        self.length = int(length) if length.isdigit() and not self._chunked else None
        wish = self.fields.get(b"connection", b"").lower()
        self.keeps = wish != b"close" and (self.version == 11 or wish == b"keep-alive")

    def read(self, size: int = -1, /) -> bytes:
        """Up to `size` bytes of the body, all that is left when negative; b'' at its end.

        Raises:
            OSError, http.client.HTTPException: the connection failed, or ended early.
        """
        if self._chunked:
            return self._chunks()
        if self.length is None:
            data = self._file.read(size)
            if size < 0 or not data:
                self.length, self.keeps = 0, False
            return data
        wanted = self.length if size < 0 else min(size, self.length)
        data = self._file.read(wanted) if wanted else b""
        self.length -= len(data)
        if not data and wanted:
            raise http.client.IncompleteRead(b"", wanted)
        return data

    def _chunks(self) -> bytes:
        """All chunks at once: only listings and errors come in chunks."""
        parts = []
        while size := int(self._file.readline(_LINE).split(b";")[0] or b"x", 16):
            parts.append(self._file.read(size))
            if len(parts[-1]) < size or self._file.readline(_LINE) != b"\r\n":
                raise http.client.IncompleteRead(b"", size)
        while self._file.readline(_LINE) not in (b"\r\n", b"\n", b""):
            pass
        self._chunked, self.length = False, 0
        return b"".join(parts)

    def _status_line(self) -> None:
        line = self._file.readline(_LINE)
        if not line:
            raise http.client.RemoteDisconnected("connection closed without an answer")
        parts = line.split(None, 2)
        if len(parts) < 2 or not parts[0].startswith(b"HTTP/1.") or not parts[1].isdigit():
            raise http.client.BadStatusLine(repr(line[:80]))
        self.version = 10 if parts[0] == b"HTTP/1.0" else 11
        self.status = int(parts[1])


class Connection:
    """One connection to one host, opened when first used and again after a failure.

    Used by one thread. `timeout` is the longest silence of the peer, in seconds. Honours the
    proxy variables of the environment; `SSL_CERT_FILE` names further authorities.
    """

    _contexts: ClassVar[list[ssl.SSLContext]] = []

    def __init__(self, endpoint: str, timeout: float) -> None:
        parts = urlsplit(endpoint)
        self.host = parts.netloc
        self._secure = parts.scheme == "https"
        self._address = (parts.hostname or "", parts.port or (443 if self._secure else 80))
        self._timeout = timeout
        self._stdlib: http.client.HTTPConnection | None = None
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
            if self._stdlib is None:
                self._stdlib = self._open()
                self._file = cast(BinaryIO, self._stdlib.sock.makefile("rb", _BUFFER))
            self._stdlib.sock.sendall(
                b"GET %b HTTP/1.1\r\nHost: %b\r\n%b\r\n"
                % (target.encode("ascii"), self.host.encode("ascii"), headers)
            )
            assert self._file is not None
            self._response = response = Response(self._file)
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
        if self._stdlib is not None:
            if self._file is not None:
                self._file.close()
            self._stdlib.close()
            self._stdlib = self._file = None

    def _open(self) -> http.client.HTTPConnection:
        host, port = self._address
        scheme = "https" if self._secure else "http"
        proxy = urllib.request.getproxies().get(scheme)
        if proxy and not urllib.request.proxy_bypass(host):
            via = urlsplit(proxy if "//" in proxy else f"//{proxy}")
            stdlib = self._make(via.hostname or "", via.port or 80)
            stdlib.set_tunnel(host, port)
        else:
            stdlib = self._make(host, port)
        stdlib.connect()
        stdlib.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return stdlib

    def _make(self, host: str, port: int) -> http.client.HTTPConnection:
        if not self._secure:
            return http.client.HTTPConnection(host, port, timeout=self._timeout)
        if not self._contexts:  # loading the authorities takes 20 ms: once for all threads
            self._contexts.append(ssl.create_default_context())
        return http.client.HTTPSConnection(
            host, port, timeout=self._timeout, context=self._contexts[0]
        )
