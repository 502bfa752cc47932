"""A `Reader` over the fast HTTP client, for sources that implement `HttpObjects`."""

from collections.abc import Callable
from concurrent.futures import Executor
from http import HTTPStatus
from typing import Protocol

from kfp_ddp.storage.http.answer import Answer
from kfp_ddp.storage.http.client import HttpClient, HttpPool
from kfp_ddp.storage.http.origin import Request
from kfp_ddp.storage.source import Entry, Transient

MAX_ERROR = 1 << 16
"""Maximum bytes of an error response that are read."""
_GOOD = frozenset({200, 206})


class HttpObjects(Protocol):
    """Builds the requests for the objects of a source, and translates error responses."""

    @property
    def authorised(self) -> bool:
        """Whether `request` can be called without `authorise`."""

    async def authorise(self) -> None:
        """Get a valid token.

        Raises:
            Transient, InputError: the credentials give none.
        """

    def request(self, entry: Entry, offset: int) -> Request:
        """Return the request for an object's bytes from `offset` on."""

    async def refusal(self, entry: Entry, status: int, body: bytes, secret: bytes) -> Exception:
        """Return the error to raise for a response with an error status.

        Args:
            entry: The object of the request.
            status: Of the response.
            body: Its first `MAX_ERROR` bytes.
            secret: The headers that authorised the request.

        Returns:
            Transient, Changed or InputError.
        """


class HttpReader:
    """Reads objects over one connection; see `Reader`."""

    def __init__(self, objects: HttpObjects, pool: HttpPool, threads: Executor) -> None:
        self._objects, self._client, self._threads = objects, HttpClient(pool), threads
        self._ahead: tuple[Entry, Request] | None = None

    def prefetch(self, entry: Entry) -> None:
        """See `Reader.prefetch`."""
        if self._objects.authorised:
            request = self._objects.request(entry, 0)
            self._ahead = entry, request
            self._client.send(request)

    async def read(self, entry: Entry) -> bytes:
        """See `Reader.read`."""
        answer = await self._open(entry, 0)
        return b"".join(answer.take())

    async def pour(self, entry: Entry, offset: int, take: Callable[[bytes], None]) -> None:
        """See `Reader.pour`."""
        answer = await self._open(entry, offset)
        skip = offset if answer.status == HTTPStatus.OK else 0  # a server without ranges

        def take_rest(block: bytes) -> None:
            nonlocal skip
            rest, skip = block[skip:], max(0, skip - len(block))
            if rest:
                take(rest)

        try:
            await self._client.rest(take_rest, self._threads)
        except OSError as error:
            raise _transient(error) from error

    def close(self) -> None:
        """See `Reader.close`."""
        self._client.close()

    async def _open(self, entry: Entry, offset: int) -> Answer:
        objects, client = self._objects, self._client
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] is entry and not offset:
            request = ahead[1]
        else:
            if not objects.authorised:
                await objects.authorise()
            request = objects.request(entry, offset)
        try:
            answer = await client.get(request)
            if answer.status not in _GOOD:
                text = b"".join(answer.take())[:MAX_ERROR]
                raise await objects.refusal(entry, answer.status, text, request.secret)
        except OSError as error:
            raise _transient(error) from error
        expected = entry.size - (offset if answer.status == HTTPStatus.PARTIAL_CONTENT else 0)
        if answer.length is not None and answer.length != expected:
            client.close()
            raise Transient(f"length {answer.length} instead of {expected}")
        return answer


def _transient(error: OSError) -> Transient:
    return Transient(f"{type(error).__name__}: {error}")
