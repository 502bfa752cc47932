"""Limits of a server: the memory of all its requests, their headers, and their time."""

import asyncio
import time
import traceback
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc  # type: ignore[import-untyped]
from kserve.constants.constants import MAX_GRPC_MESSAGE_LENGTH
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

CONNECTIONS = 1000
"""Open connections, at most; further requests are refused (503)."""
MAX_BODY = 256 << 20
"""Bytes; the default queue of 1,024 images of 224 pixels takes 147 MiB."""
MAX_JSON = 16 << 20
"""Bytes; parsing them stops all other responses for about 0.8 s."""
MAX_PICTURE = 64 << 20
MAX_TOTAL = 2 * MAX_BODY
"""Bytes of all requests that are in progress, of both protocols."""
MAX_HEAD = 64 << 10
"""Bytes of the request line and headers, or of trailers."""
MAX_HEADERS = 128
"""Headers and trailers of a request: many small ones take more memory than their bytes."""
MAX_PIPELINED = 8
"""Requests that wait on one connection until the one before is answered."""
READ_TIMEOUT = 30.0
"""Longest pause of a body in seconds."""
SLOWEST = 10_000
"""Bytes per second of a body after that time; without it 1,000 slow clients shut out the others."""
FIRST_SECONDS = 5
"""Time for the headers of the first request: idle connections must not fill all places for long."""
IDLE_SECONDS = 65
"""Time for the headers of the next request; longer than proxies keep a connection."""
_TOO_LARGE = b"\r\n".join(
    (b"HTTP/1.1 431 Request Header Fields Too Large", b"content-length: 0", b"connection: close")
)
_JSON_HEADER = "inference-header-content-length"


COPIES = 5
"""Memory of a message of gRPC as multiple of its bytes: received, parsed, its parts, an array."""
GRPC_OPTIONS = [
    ("grpc.max_send_message_length", MAX_GRPC_MESSAGE_LENGTH),
    ("grpc.max_receive_message_length", MAX_GRPC_MESSAGE_LENGTH),
    ("grpc.http2.bdp_probe", 0),  # else it receives megabytes of calls that wait
]
MESSAGE_SECONDS = 10.0
"""Time for a message, which has its memory reserved."""


class InProgress:
    """Bytes of all requests that are in progress."""

    def __init__(self) -> None:
        self.bytes = 0
        self._turn = asyncio.Lock()
        self._change = asyncio.Event()

    def add(self, size: int) -> None:
        """Count more, or less, bytes."""
        self.bytes += size
        self._change.set()

    async def reserve(self, size: int) -> None:
        """Wait, in the order of the calls, until half of the total has room for these bytes."""
        async with self._turn:
            while self.bytes + size > MAX_TOTAL // 2:
                self._change.clear()
                await self._change.wait()
            self.add(size)


class BodyLimit:
    """ASGI middleware against bodies: too large 413, slow 408, many 503; of other sites 403."""

    def __init__(self, app: "ASGIApp", progress: InProgress, picture_path: str) -> None:
        """Limit JSON, JSON with binary data, and a path for pictures."""
        self._app = app
        self._progress = progress
        self._picture_path = picture_path

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Forward a request until its body exceeds a limit."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_picture = scope["path"] == self._picture_path
        body = _Body(Headers(scope=scope), is_picture, receive, self._progress)
        try:
            await self._app(scope, body.receive, send)
        finally:
            self._progress.add(-body.arrived)


class _Body:
    """The body of a request, which is received up to its limits."""

    def __init__(
        self, headers: Headers, is_picture: bool, receive: "Receive", progress: InProgress
    ) -> None:
        self.arrived = 0
        """Bytes."""
        self._complete = False
        self._start = time.monotonic()
        self._headers = headers
        self._receive = receive
        self._progress = progress
        advice = "send fewer images, or as binary data"
        self._limit = MAX_BODY if _json_bytes(headers) is not None else MAX_JSON
        if is_picture:
            self._limit = MAX_PICTURE
            advice = "save the picture as JPEG or PNG"
        self._advice = f"more than {self._limit >> 10:,} KiB: {advice}"

    def _check_headers(self) -> None:
        """Raise HTTPException for what the headers tell before any data arrives."""
        if self._headers.get("sec-fetch-site") == "cross-site":
            raise HTTPException(403, "a page of another site sent this: open the page of /")
        given = self._headers.get(_JSON_HEADER, "")
        json_bytes = _json_bytes(self._headers)
        if given and json_bytes is None:
            raise HTTPException(400, f"{_JSON_HEADER} is no number of bytes: {given[:20]}")
        if int(self._headers.get("content-length", 0)) > self._limit:
            raise HTTPException(413, self._advice)
        before_binary = json_bytes or 0
        if self._limit == MAX_BODY and before_binary > MAX_JSON:
            raise HTTPException(413, self._advice)

    async def receive(self) -> "Message":
        """Return the next part of the body; raise HTTPException at a limit."""
        if self._complete:
            return await self._receive()  # waits for the client to disconnect
        self._check_headers()
        left = self._start + READ_TIMEOUT + self.arrived / SLOWEST - time.monotonic()
        try:
            message = await asyncio.wait_for(self._receive(), min(READ_TIMEOUT, left))
        except TimeoutError:
            raise HTTPException(408, "too little data: send the body faster") from None
        size = len(message.get("body", b""))
        self.arrived += size
        self._progress.add(size)
        if self.arrived > self._limit:
            raise HTTPException(413, self._advice)
        if self._progress.bytes > MAX_TOTAL:
            raise HTTPException(503, "too much data of other requests: retry later")
        self._complete = not message.get("more_body", False)
        return message


def _json_bytes(headers: Headers) -> int | None:
    """Return the bytes of JSON before binary data; None if there are none, or it is no number."""
    given = headers.get(_JSON_HEADER, "")
    if not given.isascii() or not given.isdigit():
        return None
    return int(given) if len(given) < 20 else None


def _forget(error: BaseException | None) -> None:
    """Release what the frames of an error hold: it is in a cycle, so the message would stay."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


class MessageLimit(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Receives the message of a call of gRPC only when there is memory for it."""

    def __init__(self, progress: InProgress) -> None:
        self._progress = progress

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: Any
    ) -> Any:
        """Return the handler of a call as one that reads its message itself."""
        handler = await continuation(details)
        if handler is None:
            return None

        async def limited(_: Any, context: Any) -> Any:
            held = COPIES * MAX_GRPC_MESSAGE_LENGTH
            await self._progress.reserve(held)
            try:
                request = await asyncio.wait_for(context.read(), MESSAGE_SECONDS)
                size = 0 if request is grpc.aio.EOF else COPIES * request.ByteSize()
                self._progress.add(size - held)
                held = size
                if request is grpc.aio.EOF:
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "there is no message")
                return await handler.unary_unary(request, context)
            except TimeoutError:
                await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "send the message faster")
            except grpc.aio.AbortError as error:
                _forget(error)
                raise
            finally:
                request = None  # this frame is in the error's cycle, too
                self._progress.add(-held)

        return grpc.stream_unary_rpc_method_handler(
            limited, handler.request_deserializer, handler.response_serializer
        )


class HttpConnection(HttpToolsProtocol):
    """A connection that is closed unless few, complete headers arrive in time.

    uvicorn would wait, and keep headers of any size.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._unread = self._head = 0
        """Bytes since the parser had a part of a request, and those of the request's headers."""
        self._wait(FIRST_SECONDS)
        if len(self.connections) > 2 * CONNECTIONS:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        """Parse data; close the connection where a line, or what is no data, has no end."""
        self._unread += len(data)
        super().data_received(data)
        if self._unread > MAX_HEAD:
            self.send_400_response("")

    def send_400_response(self, msg: str) -> None:
        """Refuse a request: 431 for its headers, else 400."""
        are_many = len(self.headers or ()) >= MAX_HEADERS
        is_large = max(self._unread, self._head) > MAX_HEAD
        if not are_many and not is_large:
            super().send_400_response(msg)
        elif not self.transport.is_closing():
            self.transport.write(_TOO_LARGE + b"\r\n\r\n")
            self.transport.close()

    def on_message_begin(self) -> None:
        """Begin a request; too many of a client that does not wait for answers are an error."""
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError("too many requests at once")
        self._head = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Count the request line."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header or trailer."""
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def _count(self, size: int) -> None:
        """Raise an error, which the parser passes on as its own, for too large a head."""
        self._head += size
        if self._head > MAX_HEAD or len(self.headers) >= MAX_HEADERS:
            raise ValueError("too large")

    def on_body(self, body: bytes) -> None:
        """Pass on a part of the body; that of a request that waits must be small."""
        if self.pipeline and len(self.cycle.body) + len(body) > MAX_HEAD:
            raise ValueError("too much data before the answer")
        self._unread = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End a request."""
        self._unread = 0
        super().on_message_complete()

    def on_headers_complete(self) -> None:
        """End the wait."""
        self._late.cancel()
        self._unread = 0
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        """Begin to wait for the next request."""
        super().on_response_complete()
        if self.cycle.response_complete:
            self._wait(IDLE_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the wait."""
        self._late.cancel()
        super().connection_lost(exc)

    def _wait(self, seconds: float) -> None:
        self._late = self.loop.call_later(seconds, self.timeout_keep_alive_handler)
