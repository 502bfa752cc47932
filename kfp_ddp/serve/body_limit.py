"""Reject requests that are too large or too slow, while they arrive."""

import asyncio
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_BODY = 256 << 20
"""Bytes; the default queue of 1,024 images of 224 pixels takes 147 MiB."""
MAX_JSON = 16 << 20
"""Bytes; parsing them stops all other responses for about 0.8 s."""
SILENCE = 30.0
"""Longest pause of a body in seconds."""
_JSON_HEADER = b"inference-header-content-length"


class BodyLimit:
    """ASGI middleware that answers 413 to too large bodies and 408 to stalled ones."""

    def __init__(self, app: "ASGIApp", max_json: int = MAX_JSON) -> None:
        """Limit JSON to `max_json` bytes, and JSON with binary data to `MAX_BODY`."""
        self._app, self._max_json = app, min(max_json, MAX_JSON)

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Forward a request until its body exceeds a limit."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        declared, arrived, complete = int(headers.get(b"content-length", 0)), 0, False
        json_header = headers.get(_JSON_HEADER, b"")
        limit = MAX_BODY if json_header else self._max_json
        too_large = declared > limit or (
            json_header.isdigit() and int(json_header) > self._max_json
        )

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
            arrived += len(message.get("body", b""))
            if arrived > limit:
                raise _too_large(limit)
            complete = not message.get("more_body", False)
            return message

        await self._app(scope, limited, send)


def _too_large(limit: int) -> HTTPException:
    text = f"more than {limit >> 10:,} KiB: send fewer images, or as binary data"
    return HTTPException(413, text)
