"""A client of HTTP for one worker, and sources that are read with it."""

import asyncio
import binascii
import hashlib
import re
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from http import HTTPStatus
from typing import Any, NamedTuple

from kfp_ddp.core.errors import InputError
from kfp_ddp.storage.http.answer import Response, TooLongError
from kfp_ddp.storage.http.connection import HttpConnection
from kfp_ddp.storage.http.origin import Origin, Request
from kfp_ddp.storage.source import Changed, Damaged, Entry, Reader, Transient, is_temporary

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MAX_REDIRECTS = 5
_KEPT = 2
_SPACING = 0.001
"""Seconds between connections that are opened ahead, so that other responses are not delayed."""
MAX_ERROR = 1 << 16
"""Maximum bytes of an error response that are read."""
TRUSTED_SECONDS = 10.0
"""How long credentials are used before the SDK is asked for them again."""
_GOOD = frozenset({200, 206})
_SHA256 = re.compile(rb"[0-9a-fA-F]{64}")


class HttpPool:
    """Connections to a server that are opened before they are needed."""

    def __init__(self, origin: Origin, timeout: float) -> None:
        self.origin = origin
        self.timeout = timeout
        self._opening: deque[asyncio.Task[HttpConnection]] = deque()

    def open(self, count: int) -> None:
        """Open connections in the background; unused ones are closed after `timeout` seconds."""
        for number in range(count):
            self._opening.append(asyncio.create_task(self._opened(number * _SPACING)))
        if count:
            asyncio.get_running_loop().call_later(self.timeout, self.close)

    async def _opened(self, seconds: float) -> HttpConnection:
        await asyncio.sleep(seconds)
        return await HttpConnection.open(self.origin, self.timeout)

    async def take(self, origin: Origin) -> HttpConnection:
        """Return a connection to a server; raise as `HttpConnection.open`."""
        while self._opening and origin == self.origin:
            connection = await self._opening.popleft()
            if connection.idle:
                return connection
        return await HttpConnection.open(origin, self.timeout)

    def close(self) -> None:
        """Close unused connections."""
        while self._opening:
            task = self._opening.popleft()
            task.cancel()
            task.add_done_callback(_close)


def _close(task: "asyncio.Task[HttpConnection]") -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().close()


class HttpClient:
    """Sends one request at a time, and one ahead."""

    def __init__(self, pool: HttpPool) -> None:
        self._pool = pool
        self._connections: dict[Origin, HttpConnection] = {}
        self._current: HttpConnection | None = None
        self._ahead: Request | None = None

    def send(self, request: Request) -> None:
        """Send the request of the next `get` now, if a connection is open."""
        connection = self._connections.get(request.origin)
        if connection is not None and connection.idle:
            connection.send(request.encoded(), request.limit)
            self._ahead = request

    async def get(self, request: Request) -> Response:
        """Return the response, with its body unless it is big; raise OSError, and InputError."""
        for _ in range(1 + _MAX_REDIRECTS):
            ahead = self._ahead
            self._ahead = None
            connection = self._connections.get(request.origin)
            try:
                if ahead != request or connection is None:
                    connection = await self._idle(request.origin)
                    connection.send(request.encoded(), request.limit)
                self._current = connection
                answer = await connection.answer()
            except BaseException:
                self.close()
                raise
            if answer.status not in _REDIRECTS:
                return answer
            location = answer.field(b"location").decode("utf-8", "replace")
            if not location:
                return answer
            request = request.redirected(location)
        raise InputError(
            f"{request.origin.host} redirects more than {_MAX_REDIRECTS} times; check the address"
        )

    async def rest(
        self, answer: Response, take: Callable[[bytes], None], threads: Executor | None = None
    ) -> None:
        """Pass the body of a response to `take`, in a thread if it is big; raise OSError."""
        if not answer.complete:
            assert self._current is not None
            try:
                await self._current.rest(take, threads)
            except BaseException:
                self.close()
                raise
        for block in answer.take():
            take(block)

    async def pour(self, request: Request, take: Callable[[bytes], None]) -> Response:
        """Pass the body of a response 200 to `take`; raise as `get`."""
        answer = await self.get(request)
        if answer.status == HTTPStatus.OK:
            await self.rest(answer, take)
        return answer

    def close(self) -> None:
        """Close all connections; another request opens new ones."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        self._ahead = None

    async def _idle(self, origin: Origin) -> HttpConnection:
        """Return a connection that is ready for a request."""
        connection = self._connections.pop(origin, None)
        if connection is None or not connection.idle:
            if connection is not None:
                connection.close()
            while len(self._connections) >= _KEPT:
                self._connections.pop(next(iter(self._connections))).close()
            connection = await self._pool.take(origin)
        self._connections[origin] = connection
        return connection


class Checksum(NamedTuple):
    """A checksum that a server or the listing gives: its name, a new state, the expected value."""

    name: str
    state: Any  # of hashlib or google_crc32c
    expected: bytes

    def verify(self) -> None:
        """Raise Damaged if the bytes that updated the state have another checksum."""
        actual = self.state.digest()
        if actual != self.expected:
            raise Damaged(f"{self.name} {actual.hex()} instead of {self.expected.hex()}")


def sha256_checksum(value: bytes) -> Checksum | None:
    """Return the SHA-256 that a store of ours left as metadata, None for other metadata."""
    if not _SHA256.fullmatch(value):
        return None
    return Checksum("SHA256", hashlib.sha256(), bytes.fromhex(value.decode()))


def md5_checksum(value: bytes) -> Checksum | None:
    """Return the MD5 of a header that has it in base64, None without one."""
    if not value:
        return None
    return Checksum("MD5", hashlib.md5(usedforsecurity=False), base64_digest(value))


def base64_digest(value: bytes) -> bytes:
    """Return a checksum in base64 as bytes; b'', which no checksum is, for an invalid one."""
    try:
        return binascii.a2b_base64(value)
    except ValueError:
        return b""


class HttpSource(ABC):
    """A source whose objects are read over HTTP; the lines of `secret` authorise the requests."""

    resumes = False
    """Not where a checksum is of the complete body alone."""
    part = sys.maxsize
    """Maximum bytes of one request."""
    advice = ""
    """Remedy in the message of `refusal`."""

    def __init__(self, url: str, origin: Origin, timeout: float) -> None:
        self.url = url
        self.origin = origin
        self.exposed = origin.exposed
        self.pool = HttpPool(origin, timeout)
        self.secret = b""
        self._lock = threading.Lock()
        self._trusted_until = 0.0

    def reader(self, threads: Executor | None) -> Reader:
        """Return a reader with a connection of its own."""
        return HttpReader(self, threads)

    @property
    def authorised(self) -> bool:
        """Whether `request` can be called without `authorise`."""
        return time.monotonic() < self._trusted_until

    async def authorise(self, refused: bytes | None = None) -> None:
        """Get valid credentials, in a thread as SDKs block: others than the `refused` secret."""
        if refused is not None or not self.authorised:
            await asyncio.to_thread(self._authorise, refused)

    def _authorise(self, refused: bytes | None) -> None:
        with self._lock:
            # Another thread may have renewed them while this one waited.
            expired = refused is None and not self.authorised
            if expired or refused == self.secret:
                self._renew(refused is not None)
                self._trusted_until = time.monotonic() + TRUSTED_SECONDS

    def _renew(self, refused: bool) -> None:
        """Get credentials for `request`, others if they were `refused`; see `authorise`."""
        return

    @abstractmethod
    def request(self, entry: Entry, offset: int) -> Request:
        """Return the request for an object's bytes from `offset` on, at most `part`."""

    async def refusal(self, entry: Entry, status: int, body: bytes, secret: bytes) -> Exception:
        """Return Transient, Changed or InputError for a response with an error status."""
        if is_temporary(status) or status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return Transient(f"HTTP {status}")
        if status == HTTPStatus.NOT_FOUND:
            return Changed(entry.name)
        return InputError(f"cannot read {entry.name!r} of {self.url}: HTTP {status}; {self.advice}")

    def has_pin(self, entry: Entry, answer: Response) -> bool:
        """Return whether the response is of the content that the entry pins."""
        return True

    def checksum(self, entry: Entry, answer: Response) -> Checksum | None:
        """Return the checksum of the complete object, None where there is none."""
        return None

    def part_checksum(self, answer: Response) -> Checksum | None:
        """Return the checksum of a response to a request for a part."""
        return None


class SdkSource(HttpSource):
    """A source whose SDK knows the error codes, regions and credentials; ETags pin its objects."""

    def has_pin(self, entry: Entry, answer: Response) -> bool:
        """See `HttpSource.has_pin`; there are servers that ignore If-Match."""
        return answer.field(b"etag").strip(b'"') == entry.tag.encode()

    async def refusal(self, entry: Entry, status: int, body: bytes, secret: bytes) -> Exception:
        """See `HttpSource.refusal`; the SDK asks for the object again."""
        if is_temporary(status):
            return Transient(f"HTTP {status}")
        return await asyncio.to_thread(self._ask_sdk, entry) or Transient(f"HTTP {status}")

    @abstractmethod
    def _ask_sdk(self, entry: Entry) -> Exception | None:
        """Return the error of the SDK for an object, None if it gets it; renew the credentials."""


class HttpReader:
    """Reads objects over one connection; see `Reader`."""

    def __init__(self, source: HttpSource, threads: Executor | None) -> None:
        self._source = source
        self._client = HttpClient(source.pool)
        self._threads = threads
        self._ahead: tuple[Entry, Request] | None = None

    def prefetch(self, entry: Entry) -> None:
        """See `Reader.prefetch`."""
        if self._source.authorised:
            request = self._source.request(entry, 0)
            self._ahead = entry, request
            self._client.send(request)

    async def read(self, entry: Entry) -> bytes:
        """See `Reader.read`."""
        answer = await self._open(entry, 0)
        body = b"".join(answer.take())
        checksum = self._source.checksum(entry, answer) or self._source.part_checksum(answer)
        if checksum:
            checksum.state.update(body)
            checksum.verify()
        return body

    async def pour(self, entry: Entry, offset: int, take: Callable[[bytes], None]) -> None:
        """See `Reader.pour`."""
        complete: Checksum | None = None
        start = offset
        before = -1
        while before < offset < entry.size:
            answer = await self._open(entry, offset)
            if offset == start == 0:
                complete = self._source.checksum(entry, answer)
            part = self._source.part_checksum(answer)
            checksums = [checksum for checksum in (complete, part) if checksum]
            before = offset
            offset += await self._rest(answer, offset, checksums, take)
            for checksum in checksums:
                if checksum is not complete or offset >= entry.size:
                    checksum.verify()

    async def _rest(
        self,
        answer: Response,
        offset: int,
        checksums: list[Checksum],
        take: Callable[[bytes], None],
    ) -> int:
        """Pass a body to `take`; return its number of bytes from `offset` on."""
        skip = offset if answer.status == HTTPStatus.OK else 0  # a server without ranges
        size = 0

        def take_rest(block: bytes) -> None:
            nonlocal skip, size
            rest = block[skip:]
            skip = max(0, skip - len(block))
            if rest:
                size += len(rest)
                for checksum in checksums:
                    checksum.state.update(rest)
                take(rest)

        try:
            await self._client.rest(answer, take_rest, self._threads)
        except OSError as error:
            raise _transient(error) from error
        return size

    def close(self) -> None:
        """See `Reader.close`."""
        self._client.close()

    async def _open(self, entry: Entry, offset: int) -> Response:
        source = self._source
        client = self._client
        ahead = self._ahead
        self._ahead = None
        if ahead is not None and ahead[0] is entry and not offset:
            request = ahead[1]
        else:
            await source.authorise()
            request = source.request(entry, offset)
        try:
            answer = await client.get(request)
            if answer.status not in _GOOD:
                text = b"".join(answer.take())[:MAX_ERROR]
                raise await source.refusal(entry, answer.status, text, request.secret)
            expected = entry.size
            pinned = source.has_pin(entry, answer)
            if answer.status == HTTPStatus.PARTIAL_CONTENT:
                expected = min(source.part, entry.size - offset)
                span = b"bytes %d-%d/" % (offset, offset + expected - 1)
                spans = (span + b"%d" % entry.size, span + b"*")
                pinned &= answer.field(b"content-range").lower() in spans
        except OSError as error:
            raise _transient(error) from error
        if not pinned:
            client.close()
            raise Changed(entry.name)
        if answer.length is not None and answer.length != expected:
            client.close()
            raise Damaged(f"length {answer.length} instead of {expected}")
        return answer


def _transient(error: OSError) -> Transient:
    kind = Damaged if isinstance(error, TooLongError) else Transient
    return kind(f"{type(error).__name__}: {error}")
