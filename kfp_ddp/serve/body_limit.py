"""Requests that are too long for a server's memory, refused while they arrive."""

from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_BODY = 256 << 20
"""Bytes: 1,024 images of 224 pixels, as many as may wait, take 147 MiB in the binary format."""


class BodyLimit:
    """ASGI middleware that answers 413 to a body of more than `MAX_BODY` bytes."""

    def __init__(self, app: "ASGIApp") -> None:
        self._app = app

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Pass a request on, and its body for as long as it is none too long."""
        headers = dict(scope.get("headers", ()))
        told, arrived = int(headers.get(b"content-length", 0)), 0

        async def limited() -> "Message":
            nonlocal arrived
            message = {} if told > MAX_BODY else await receive()
            arrived += len(message.get("body", b""))
            if max(told, arrived) > MAX_BODY:
                raise HTTPException(413, f"more than {MAX_BODY >> 20} MiB: ask for fewer images")
            return message

        await self._app(scope, limited, send)
