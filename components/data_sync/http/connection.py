"""One connection of the event loop: requests, each with its answer."""

import asyncio
from typing import Self

from kfp_ddp.base.errors import InputError
from kfp_ddp.components.data_sync.http.answer import Answer, HttpError
from kfp_ddp.components.data_sync.http.origin import Origin, tls

BLOCK = 1 << 20
"""Bytes of a body that gather before they are handed on; a connection holds about two such."""
_CHECKS = 4
# All connections are of one thread, and each leaves the buffer before another fills it. Under 128
# KiB, as above that glibc maps memory anew for every copy of it.
_BUFFER = memoryview(bytearray(120 << 10))


class HttpConnection(asyncio.BufferedProtocol):
    """A connection to one server; when it is closed it stays so.

    `timeout` is the longest silence of the peer in seconds while an answer is waited for.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._answer: Answer | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._error: OSError | None = None
        self._silence = 0
        self._timer: asyncio.TimerHandle | None = None

    @classmethod
    async def open(cls, origin: Origin, timeout: float) -> Self:
        """Connect, through the proxy of the environment if it names one.

        Raises:
            OSError: nobody is there, or it is not who it should be.
            InputError: the proxy does not let us through.
        """
        connection = cls(timeout)
        try:
            async with asyncio.timeout(timeout):
                await connection._connect(origin)
        except TimeoutError as error:
            connection.close()
            raise TimeoutError(f"no connection in {timeout:g} s") from error
        except ConnectionRefusedError as error:
            raise ConnectionRefusedError(f"{error.strerror}: connection refused") from error
        except BaseException:
            connection.close()
            raise
        return connection

    @property
    def idle(self) -> bool:
        """Whether another request can be sent."""
        open_ = self._transport is not None and not self._transport.is_closing()
        return open_ and (self._answer is None or (self._answer.complete and self._answer.keeps))

    def send(self, request: bytes, bodiless: bool = False) -> None:
        """Ask, on a connection that is idle; `answer` waits for what is said."""
        assert self._transport is not None
        self._answer = Answer(bodiless)
        self._transport.write(request)

    async def answer(self) -> Answer:
        """The answer, when it is complete, or a block of its body has come.

        Called again after that was taken, for the next block.

        Raises:
            OSError: the connection failed.
        """
        answer = self._answer
        assert answer is not None
        if not answer.complete and answer.size < BLOCK and self._transport is not None:
            self._transport.resume_reading()
            self._waiter, self._silence = self._loop.create_future(), 0
            if self._timer is None:
                self._timer = self._loop.call_later(self._timeout / _CHECKS, self._check)
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._error is not None and not answer.complete:
            raise self._error
        return answer

    def close(self) -> None:
        """Close the connection; who waits for an answer is told."""
        self._fail(ConnectionAbortedError("closed"))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.BaseProtocol`."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        """See `asyncio.BufferedProtocol`."""
        return _BUFFER

    def buffer_updated(self, nbytes: int) -> None:
        """See `asyncio.BufferedProtocol`."""
        answer = self._answer
        if answer is None or answer.complete:  # a peer that speaks without being asked
            self.close()
            return
        self._silence = 0
        try:
            answer.feed(bytes(_BUFFER[:nbytes]))
        except HttpError as error:
            self._fail(error)
            return
        if answer.complete:
            if not answer.keeps:
                self.close()
            self._wake()
        elif answer.size >= BLOCK:
            if self._waiter is None and self._transport is not None:
                self._transport.pause_reading()
            self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        """See `asyncio.BaseProtocol`; the end of a body that does not tell its length."""
        try:
            if error is not None:
                raise error
            if self._answer is not None:
                self._answer.finish()
                self._answer.keeps = False
        except OSError as problem:
            self._fail(problem)
        else:
            self.close()

    async def _connect(self, origin: Origin) -> None:
        context = tls() if origin.secure else None
        if not origin.proxy:
            await self._loop.create_connection(lambda: self, origin.host, origin.port, ssl=context)
            return
        host, port, request = origin.tunnel()
        transport, _ = await self._loop.create_connection(lambda: self, host, port)
        self.send(request, bodiless=True)
        status = (await self.answer()).status
        if status == 407:
            raise InputError(
                f"proxy {host}:{port} refuses us (HTTP 407); give it a user and a password that "
                "it knows, as http://user:password@host:port"
            )
        if status // 100 != 2:
            raise HttpError(f"proxy {host}:{port} answers HTTP {status}")
        if context is not None:
            self._transport = await self._loop.start_tls(
                transport, self, context, server_hostname=origin.host
            )

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _check(self) -> None:
        """Fail what is waited for if the peer has been silent for too long."""
        self._timer = None
        if self._waiter is None:
            return
        self._silence += 1
        if self._silence > _CHECKS:
            self._fail(TimeoutError("timed out"))
        else:
            self._timer = self._loop.call_later(self._timeout / _CHECKS, self._check)

    def _fail(self, error: OSError) -> None:
        self._error = self._error or error
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._transport is not None:
            transport, self._transport = self._transport, None
            transport.abort()
        self._wake()
