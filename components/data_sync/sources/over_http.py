"""What the sources that speak HTTP share: how an object is asked for, and an answer is taken."""

import http.client
from collections.abc import Callable
from http import HTTPStatus
from typing import Protocol

from kfp_ddp.components.data_sync.connection import Connection, Response
from kfp_ddp.components.data_sync.sources import Body, Transient

RETRYABLE = frozenset({408, 416, 429, 500, 502, 503, 504})
"""Statuses that another attempt can mend."""
_CHUNK = 1 << 20


class HttpObjects(Protocol):
    """The objects of a source, as a server is asked for them; used by many threads."""

    endpoint: str
    timeout: float
    """The longest silence of the server, in seconds."""

    def request(self, name: str, generation: int, offset: int) -> tuple[str, bytes]:
        """The target to GET, and header lines, for an object's bytes from `offset` on.

        Raises:
            Transient, InputError: the credentials give no token.
        """

    def refusal(self, name: str, status: int, body: bytes, headers: bytes) -> Exception:
        """What an answer other than the bytes means, to be raised; `headers` were sent.

        That is Transient, Changed or InputError.
        """


class HttpBody:
    """The body of an HTTP answer; `abandon` closes its connection."""

    def __init__(self, response: Response, abandon: Callable[[], None]) -> None:
        self._response, self._abandon = response, abandon

    def read(self, size: int = -1, /) -> bytes:
        """See `Body.read`."""
        try:
            return self._response.read(size)
        except (OSError, http.client.HTTPException) as error:
            self._abandon()
            raise Transient(f"{type(error).__name__}: {error}") from error

    def close(self) -> None:
        """See `Body.close`."""
        # Cut short by the peer, or not read to the end: this connection cannot go on.
        if self._response.length != 0:
            self._abandon()


class HttpReader:
    """Objects over one connection; see `Reader`."""

    def __init__(self, objects: HttpObjects) -> None:
        self._objects = objects
        self._connection = Connection(objects.endpoint, objects.timeout)

    def open(self, name: str, generation: int, tag: str, size: int, offset: int) -> Body:
        """Start a download of what was listed; see `Reader.open`."""
        target, headers = self._objects.request(name, generation, offset)
        try:
            response = self._connection.get(target, headers)
            if response.status not in (HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT):
                raise self._objects.refusal(name, response.status, response.read(), headers)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise Transient(f"{type(error).__name__}: {error}") from error
        body = HttpBody(response, self.close)
        skip = offset if response.status == HTTPStatus.OK else 0  # a server without ranges
        while skip and (data := body.read(min(skip, _CHUNK))):
            skip -= len(data)
        expected = size - offset
        if response.length is not None and response.length != expected and expected:
            self.close()
            raise Transient(f"length {response.length} instead of {expected}")
        return body

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()
