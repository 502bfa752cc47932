"""Reject requests that are too large, too slow or of other sites' pages, while they arrive."""

import asyncio
import time
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
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
READ_TIMEOUT = 30.0
"""Longest pause of a body in seconds."""
SLOWEST = 10_000
"""Bytes per second of a body after that time; without it 1,000 slow clients shut out the others."""
FIRST_SECONDS = 5
"""Time for the headers of the first request: idle connections must not fill all places for long."""
IDLE_SECONDS = 65
"""Time for the headers of the next request; longer than proxies keep a connection."""
_JSON_HEADER = "inference-header-content-length"


class BodyLimit:
    """ASGI middleware against bodies: too large 413, slow 408, many 503; of other sites 403."""

    def __init__(self, app: "ASGIApp", picture_path: str) -> None:
        """Limit JSON, JSON with binary data, and a path for pictures."""
        self._app, self._picture_path, self._total = app, picture_path, 0

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Forward a request until its body exceeds a limit."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, start = Headers(scope=scope), time.monotonic()
        declared, arrived, complete = int(headers.get("content-length", 0)), 0, False
        json_size = headers.get(_JSON_HEADER, "")
        is_number = json_size.isascii() and json_size.isdigit() and len(json_size) < 20
        limit = MAX_BODY if is_number else MAX_JSON
        if scope["path"] == self._picture_path:
            limit = MAX_PICTURE
        is_large = declared > limit or (limit == MAX_BODY and int(json_size) > MAX_JSON)
        advice = f"more than {limit >> 10:,} KiB: send fewer images, or as binary data"

        async def limited() -> "Message":
            nonlocal arrived, complete
            if complete:
                return await receive()  # waits for the client to disconnect
            if headers.get("sec-fetch-site") == "cross-site":
                raise HTTPException(403, "a page of another site sent this: open the page of /")
            if json_size and not is_number:
                raise HTTPException(400, f"{_JSON_HEADER} is no number of bytes: {json_size[:20]}")
            if is_large:
                raise HTTPException(413, advice)
            left = start + READ_TIMEOUT + arrived / SLOWEST - time.monotonic()
            try:
                message = await asyncio.wait_for(receive(), min(READ_TIMEOUT, left))
            except TimeoutError:
                raise HTTPException(408, "too little data: send the body faster") from None
            size = len(message.get("body", b""))
            arrived += size
            self._total += size
            if arrived > limit:
                raise HTTPException(413, advice)
            if self._total > MAX_TOTAL:
                raise HTTPException(503, "too much data of other requests: retry later")
            complete = not message.get("more_body", False)
            return message

        try:
            await self._app(scope, limited, send)
        finally:
            self._total -= arrived


class HttpConnection(HttpToolsProtocol):
    """A connection that is closed unless complete headers arrive in time; uvicorn would wait."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._wait(FIRST_SECONDS)

    def on_headers_complete(self) -> None:
        """End the wait."""
        self._late.cancel()
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
