"""What the sources that speak HTTP share: how an object is asked for, and an answer is taken."""

from http import HTTPStatus
from typing import Protocol

from kfp_ddp.components.data_sync.http.answer import Answer
from kfp_ddp.components.data_sync.http.client import HttpClient, HttpPool
from kfp_ddp.components.data_sync.http.origin import Request
from kfp_ddp.components.data_sync.sources import Entry, Transient

RETRYABLE = frozenset({408, 416, 429, 500, 502, 503, 504})
"""Statuses that another attempt can mend."""
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

    def __init__(self, objects: HttpObjects, pool: HttpPool) -> None:
        self._objects, self._client = objects, HttpClient(pool)
        self._ahead: tuple[Entry, Request] | None = None
        self._answer = Answer()
        self._skip = 0

    def ask(self, entry: Entry) -> None:
        """See `Reader.ask`."""
        if self._objects.authorised:
            request = self._objects.request(entry, 0)
            self._ahead = entry, request
            self._client.send(request)

    async def open(self, entry: Entry, offset: int) -> None:
        """Start a download of what was listed; see `Reader.open`."""
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
            raise Transient(f"{type(error).__name__}: {error}") from error
        skip = offset if answer.status == HTTPStatus.OK else 0  # a server without ranges
        expected = entry.size - offset + skip
        if answer.length is not None and answer.length != expected:
            client.close()
            raise Transient(f"length {answer.length} instead of {expected}")
        self._answer, self._skip = answer, skip

    async def read(self) -> list[bytes]:
        """See `Reader.read`."""
        answer = self._answer
        blocks = self._taken()
        while not answer.complete and not blocks:
            try:
                await self._client.more()
            except OSError as error:
                raise Transient(f"{type(error).__name__}: {error}") from error
            blocks = self._taken()
        return blocks

    def close(self) -> None:
        """See `Reader.close`."""
        self._client.close()

    def _taken(self) -> list[bytes]:
        """What has come, without what was not asked for."""
        blocks = self._answer.take()
        if not self._skip:
            return blocks
        data = b"".join(blocks)
        left, self._skip = data[self._skip :], max(0, self._skip - len(data))
        return [left] if left else []
