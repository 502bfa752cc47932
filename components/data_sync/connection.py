"""Keep-alive HTTP for many small bodies: http.client's sockets, TLS and bodies, lean headers."""

import http.client
import socket
import ssl
import urllib.request
from typing import ClassVar
from urllib.parse import urlsplit

_LINE = 65536


class Response(http.client.HTTPResponse):
    """An answer whose headers are split by hand.

    http.client parses headers as e-mail, which costs half the processor time of a small file.
    """

    def begin(self) -> None:
        """Read the status line and headers; `fields` maps lower-case names to values."""
        self.fields: dict[bytes, bytes] = {}
        status = 100
        while status == http.HTTPStatus.CONTINUE:
            status = self._status()
            while (line := self.fp.readline(_LINE)) not in (b"\r\n", b"\n", b""):
                key, _, value = line.partition(b":")
                self.fields[key.strip().lower()] = value.strip()
        self.code = self.status = status
        self.chunked = self.fields.get(b"transfer-encoding", b"").lower() == b"chunked"
        self.chunk_left = None
        length = self.fields.get(b"content-length", b"")
        self.length = int(length) if length.isdigit() and not self.chunked else None
        wish = self.fields.get(b"connection", b"").lower()
        self.will_close = wish == b"close" or (self.version == 10 and wish != b"keep-alive")
        if not self.chunked and self.length is None:
            self.will_close = True

    def _status(self) -> int:
        line = self.fp.readline(_LINE)
        if not line:
            raise http.client.RemoteDisconnected("connection closed without an answer")
        parts = line.split(None, 2)
        if len(parts) < 2 or not parts[0].startswith(b"HTTP/1.") or not parts[1].isdigit():
            raise http.client.BadStatusLine(repr(line[:80]))
        self.version = 10 if parts[0] == b"HTTP/1.0" else 11
        self.reason = parts[2].strip().decode("latin-1") if len(parts) > 2 else ""
        return int(parts[1])


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
        self._response: Response | None = None

    def get(self, target: str, headers: bytes = b"") -> Response:
        """Send GET and read the answer's head; the body is the caller's to read whole.

        `headers` are complete lines, each with its CRLF. An answer not read to its end makes
        the next call open a new connection.

        Raises:
            OSError, http.client.HTTPException: the connection failed; `close` was called.
        """
        previous = self._response
        if previous is not None and (previous.will_close or not previous.isclosed()):
            self.close()
        try:
            if self._stdlib is None:
                self._stdlib = self._open()
            sock = self._stdlib.sock
            sock.sendall(
                b"GET %b HTTP/1.1\r\nHost: %b\r\n%b\r\n"
                % (target.encode("ascii"), self.host.encode("ascii"), headers)
            )
            self._response = response = Response(sock, method="GET")
            response.begin()
            if response.length == 0:
                response.read()
        except BaseException:
            self.close()
            raise
        return response

    def close(self) -> None:
        """Close the socket, if any."""
        if self._response is not None:
            self._response.close()
            self._response = None
        if self._stdlib is not None:
            self._stdlib.close()
            self._stdlib = None

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
