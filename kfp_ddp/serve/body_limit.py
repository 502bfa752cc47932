"""Reject requests that are too large, while they arrive."""

from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_BODY = 256 << 20
"""Bytes; the default queue of 1,024 images of 224 pixels takes 147 MiB."""


class BodyLimit:
    """ASGI middleware that answers 413 to a body of more than `MAX_BODY` bytes."""

    def __init__(self, app: "ASGIApp") -> None:
        self._app = app

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Forward a request until its body exceeds the limit."""
        headers = dict(scope.get("headers", ()))
        declared, arrived = int(headers.get(b"content-length", 0)), 0

        async def limited() -> "Message":
            nonlocal arrived
            message = {} if declared > MAX_BODY else await receive()
            arrived += len(message.get("body", b""))
            if max(declared, arrived) > MAX_BODY:
                raise HTTPException(413, f"more than {MAX_BODY >> 20} MiB: send fewer images")
            return message

        await self._app(scope, limited, send)
