"""Reject requests that are too large or too slow, while they arrive."""

import asyncio
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_BODY = 256 << 20
"""Bytes; the default queue of 1,024 images of 224 pixels takes 147 MiB."""
MAX_JSON = 16 << 20
"""Bytes; parsing them stops all other responses for about 0.8 s."""
MAX_PICTURE = 64 << 20
MAX_TOTAL = 2 * MAX_BODY
"""Bytes of all requests that are in progress."""
SILENCE = 30.0
"""Longest pause of a body in seconds."""
IDLE_SECONDS = 65
"""Time for the headers of the next request; longer than proxies keep a connection."""
_JSON_HEADER = b"inference-header-content-length"


class BodyLimit:
    """ASGI middleware that answers 413, 408 or 503 to bodies: too large, stalled, too many."""

    def __init__(self, app: "ASGIApp", picture_path: str) -> None:
        """Limit JSON, JSON with binary data, and a path for pictures."""
        self._app, self._picture_path, self._total = app, picture_path, 0

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Forward a request until its body exceeds a limit."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        declared, arrived, complete = int(headers.get(b"content-length", 0)), 0, False
        json_header = headers.get(_JSON_HEADER, b"")
        limit = MAX_BODY if json_header else MAX_JSON
        if scope["path"] == self._picture_path:
            limit = MAX_PICTURE
        too_large = declared > limit or (json_header.isdigit() and int(json_header) > MAX_JSON)

        async def limited() -> "Message":
            nonlocal arrived, complete
            if complete:
                return await receive()  # waits for the client to disconnect
            if too_large:
                raise _too_large(limit)
            try:
                message = await asyncio.wait_for(receive(), SILENCE)
            except TimeoutError:
                text = f"no data for {SILENCE:.0f} s: send the body faster"
                raise HTTPException(408, text) from None
            size = len(message.get("body", b""))
            arrived += size
            self._total += size
            if arrived > limit:
                raise _too_large(limit)
            if self._total > MAX_TOTAL:
                raise HTTPException(503, "too much data of other requests: retry later")
            complete = not message.get("more_body", False)
            return message

        try:
            await self._app(scope, limited, send)
        finally:
            self._total -= arrived


def _too_large(limit: int) -> HTTPException:
    text = f"more than {limit >> 10:,} KiB: send fewer images, or as binary data"
    return HTTPException(413, text)


class Connection(HttpToolsProtocol):
    """A connection that is closed unless complete headers arrive in time; uvicorn would wait."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._wait()

    def on_headers_complete(self) -> None:
        """End the wait."""
        self._late.cancel()
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        """Begin to wait for the next request."""
        super().on_response_complete()
        if self.cycle.response_complete:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the wait."""
        self._late.cancel()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._late = self.loop.call_later(IDLE_SECONDS, self.timeout_keep_alive_handler)
