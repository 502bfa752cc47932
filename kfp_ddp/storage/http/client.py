"""Requests of one worker over connections that stay open, also to where it is redirected."""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from http import HTTPStatus

from kfp_ddp.core.errors import InputError
from kfp_ddp.storage.http.answer import Answer
from kfp_ddp.storage.http.connection import HttpConnection
from kfp_ddp.storage.http.origin import Origin, Request

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MAX_REDIRECTS = 5
_KEPT = 2
_SPACING = 0.001
"""Seconds between connections that are opened ahead, so that other responses are not delayed."""


class HttpPool:
    """Connections to a server that are opened before they are needed."""

    def __init__(self, origin: Origin, timeout: float) -> None:
        self.origin, self.timeout = origin, timeout
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
        """Return a connection to a server; raises as `HttpConnection.open`."""
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

    async def get(self, request: Request) -> Answer:
        """Return the response, with its body unless that is big: see `rest`.

        Raises OSError if the connection failed, which closes it, and InputError for a redirect
        that is not allowed.
        """
        for _ in range(1 + _MAX_REDIRECTS):
            ahead, self._ahead = self._ahead, None
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

    async def rest(self, take: Callable[[bytes], None], threads: Executor | None = None) -> None:
        """Pass the body of a big response to `take`, in a thread; raises OSError as `get`."""
        assert self._current is not None
        try:
            await self._current.rest(take, threads)
        except BaseException:
            self.close()
            raise

    async def pour(self, request: Request, take: Callable[[bytes], None]) -> Answer:
        """Pass the body of a response 200 to `take`, in a thread if it is big; raises as `get`."""
        answer = await self.get(request)
        if answer.status == HTTPStatus.OK:
            if not answer.complete:
                await self.rest(take)
            for block in answer.take():
                take(block)
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
