"""One keep-alive connection of an event loop: a question, then its whole answer."""

import asyncio
import http.client
import io
import socket

from kfp_ddp.components.data_sync.connection import Endpoint, Response

_HEAD = 1 << 16
_BUFFER = 1 << 16


class Line(asyncio.BufferedProtocol):
    """One connection to one host, opened when first used and again after a failure.

    `timeout` is the longest silence of the peer, in seconds: who owns the line calls `check`
    now and then. Honours the proxy variables of the environment, as `Connection` does.
    """

    def __init__(self, endpoint: Endpoint, timeout: float) -> None:
        self._endpoint, self._timeout = endpoint, timeout
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[Response] | None = None
        self._heard = 0.0
        self._buffer = memoryview(bytearray(_BUFFER))
        self._parts: list[bytes] = []
        self._size = 0
        self._response: Response | None = None

    async def get(self, target: str, headers: bytes = b"") -> Response:
        """Send GET and return the answer when all of it is there; `Response.read` is at once.

        Raises:
            OSError, http.client.HTTPException: the connection failed; `close` was called.
        """
        loop = asyncio.get_running_loop()
        try:
            if self._transport is None or self._transport.is_closing():
                self._transport = await self._open(loop)
            self._parts, self._size, self._response = [], 0, None
            self._answer, self._heard = loop.create_future(), loop.time()
            self._transport.write(self._endpoint.question(target, headers))
            return await self._answer
        except BaseException:
            self.close()
            raise
        finally:
            self._answer = None

    def check(self) -> None:
        """Fail what is asked for if the peer has been silent for too long."""
        if self._answer and self._answer.get_loop().time() - self._heard > self._timeout:
            self.fail(TimeoutError("timed out"))

    def fail(self, error: Exception) -> None:
        """End the wait for an answer, if any, with this error."""
        if self._answer and not self._answer.done():
            self._answer.set_exception(error)

    def close(self) -> None:
        """Close the connection, if any."""
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    async def _open(self, loop: asyncio.AbstractEventLoop) -> asyncio.Transport:
        endpoint = self._endpoint
        tls = endpoint.context() if endpoint.secure else None
        async with asyncio.timeout(self._timeout):
            if not endpoint.proxied:
                transport, _ = await loop.create_connection(
                    lambda: self, endpoint.host, endpoint.port, ssl=tls
                )
                return transport
            stdlib = await asyncio.to_thread(endpoint.dial, self._timeout)
            stdlib.sock.setblocking(False)
            tunnel: socket.socket = stdlib.sock
            name = endpoint.host if tls else None
            transport, _ = await loop.create_connection(
                lambda: self, sock=tunnel, ssl=tls, server_hostname=name
            )
            return transport

    def get_buffer(self, sizehint: int) -> memoryview:
        """See `asyncio.BufferedProtocol`."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """See `asyncio.BufferedProtocol`."""
        if self._answer is None:  # nothing was asked for: a peer that says more than it announced
            self.close()
            return
        self._heard = self._answer.get_loop().time()
        self._parts.append(bytes(self._buffer[:nbytes]))
        self._size += nbytes
        try:
            if self._response is None:
                self._read_head()
            if self._response is not None:
                self._read_body(self._response)
        except (http.client.HTTPException, ValueError) as error:
            self.fail(http.client.HTTPException(str(error)))

    def connection_lost(self, error: Exception | None) -> None:
        """See `asyncio.BufferedProtocol`; the end of an answer that does not tell its length."""
        self._transport = None
        response = self._response
        if response is not None and response.length is None and error is None:
            self._finish(response, self._size)
        where = "within the answer" if self._size else "without an answer"
        self.fail(error or http.client.RemoteDisconnected(f"connection closed {where}"))

    def _read_head(self) -> None:
        received = b"".join(self._parts)
        end = received.find(b"\r\n\r\n") + 4
        if end >= 4:
            self._response = Response(received[:end], io.BytesIO())
            self._parts, self._size = [received[end:]], len(received) - end
        elif len(received) > _HEAD:
            raise http.client.HTTPException("endless head")

    def _read_body(self, response: Response) -> None:
        if response.length is not None:
            if self._size >= response.length:
                self._finish(response, response.length)
        elif response.chunked and b"".join(self._parts).endswith(b"0\r\n\r\n"):
            self._finish(response, self._size)

    def _finish(self, response: Response, size: int) -> None:
        if not response.keeps or self._size != size:
            self.close()
        response.file = io.BytesIO(b"".join(self._parts))
        if self._answer and not self._answer.done():
            self._answer.set_result(response)
