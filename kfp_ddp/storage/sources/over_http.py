"""What the sources that speak HTTP share: how an object is asked for, and an answer is taken."""

from collections.abc import Callable
from concurrent.futures import Executor
from http import HTTPStatus
from typing import Protocol

from kfp_ddp.storage.http.answer import Answer
from kfp_ddp.storage.http.client import HttpClient, HttpPool
from kfp_ddp.storage.http.origin import Request
from kfp_ddp.storage.sources import Entry, Transient

MAX_ERROR = 1 << 16
"""Bytes of an error's text that are read."""
_GOOD = frozenset({200, 206})


class HttpObjects(Protocol):
    """The objects of a source, as a server is asked for them."""

    @property
    def authorised(self) -> bool:
        """Whether `request` can be called without `authorise`."""

    async def authorise(self) -> None:
        """Get a token that lasts.

        Raises:
            Transient, InputError: the credentials give none.
        """

    def request(self, entry: Entry, offset: int) -> Request:
        """The request for an object's bytes from `offset` on."""

    async def refusal(self, entry: Entry, status: int, body: bytes, secret: bytes) -> Exception:
        """What an answer other than the bytes means, to be raised; `secret` was sent.

        That is Transient, Changed or InputError.
        """


class HttpReader:
    """Objects over one connection; see `Reader`."""

    def __init__(self, objects: HttpObjects, pool: HttpPool, threads: Executor) -> None:
        self._objects, self._client, self._threads = objects, HttpClient(pool), threads
        self._ahead: tuple[Entry, Request] | None = None

    def ask(self, entry: Entry) -> None:
        """See `Reader.ask`."""
        if self._objects.authorised:
            request = self._objects.request(entry, 0)
            self._ahead = entry, request
            self._client.send(request)

    async def whole(self, entry: Entry) -> bytes:
        """See `Reader.whole`."""
        answer = await self._open(entry, 0)
        return b"".join(answer.take())

    async def pour(self, entry: Entry, offset: int, take: Callable[[bytes], None]) -> None:
        """See `Reader.pour`."""
        answer = await self._open(entry, offset)
        skip = offset if answer.status == HTTPStatus.OK else 0  # a server without ranges

        def take_rest(block: bytes) -> None:
            nonlocal skip
            wanted, skip = block[skip:], max(0, skip - len(block))
            if wanted:
                take(wanted)

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
