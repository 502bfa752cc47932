"""Limits of a request's body: size of JSON, size with binary data, pauses."""

import asyncio
from typing import Any

import pytest
from starlette.exceptions import HTTPException

from kfp_ddp.serve import body_limit
from kfp_ddp.serve.body_limit import MAX_BODY, BodyLimit


def status(parts: list[bytes], headers: dict[str, int], ends: bool = True) -> int:
    """Return the status of a request whose body arrives in parts, and may stall at the end."""
    messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    if ends:
        messages[-1]["more_body"] = False

    async def receive() -> Any:
        if messages:
            return messages.pop(0)
        return await asyncio.Event().wait()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            pass

    async def send(message: Any) -> None:
        """Ignore the response."""

    scope = {
        "type": "http",
        "headers": [
            (name.replace("_", "-").encode(), str(size).encode()) for name, size in headers.items()
        ],
    }
    try:
        asyncio.run(BodyLimit(app, max_json=100)(scope, receive, send))
    except HTTPException as error:
        return error.status_code
    return 200


@pytest.mark.parametrize(
    ("parts", "headers", "expected"),
    [
        ([b"x" * 50, b"x" * 50], {}, 200),
        ([b"x" * 50, b"x" * 51], {}, 413),
        ([b"x"], {"content_length": 101}, 413),
        ([b"x" * 500], {"content_length": 500, "inference_header_content_length": 100}, 200),
        ([b"x" * 500], {"content_length": 500, "inference_header_content_length": 101}, 413),
        ([b"x"], {"content_length": MAX_BODY + 1, "inference_header_content_length": 9}, 413),
    ],
)
def test_body_is_limited(parts: list[bytes], headers: dict[str, int], expected: int) -> None:
    assert status(parts, headers) == expected


def test_body_that_stalls_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_limit, "SILENCE", 0.01)
    assert status([b"x"], {}, ends=False) == 408
