"""Limits of a request: time of the headers, size and pauses of the body."""

import asyncio
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from starlette.exceptions import HTTPException
from uvicorn.server import ServerState

from kfp_ddp.serve import limits
from kfp_ddp.serve.limits import MAX_BODY, BodyLimit, Connection


def status(
    parts: list[bytes], headers: dict[str, Any], path: str = "/v2", ends: bool = True
) -> int:
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
        "path": path,
        "headers": [
            (name.replace("_", "-").encode(), str(size).encode()) for name, size in headers.items()
        ],
    }
    limit = BodyLimit(app, "/predict")
    try:
        asyncio.run(limit(scope, receive, send))
    except HTTPException as error:
        return error.status_code
    finally:
        assert limit._total == 0
    return 200


@pytest.mark.parametrize(
    ("parts", "headers", "path", "expected"),
    [
        ([b"x" * 50, b"x" * 50], {}, "/v2", 200),
        ([b"x" * 50, b"x" * 51], {}, "/v2", 413),
        ([b"x"], {"content_length": 101}, "/v2", 413),
        ([b"x" * 500], {"content_length": 500, "inference_header_content_length": 100}, "/v2", 200),
        ([b"x" * 500], {"content_length": 500, "inference_header_content_length": 101}, "/v2", 413),
        (
            [b"x"],
            {"content_length": MAX_BODY + 1, "inference_header_content_length": 9},
            "/v2",
            413,
        ),
        ([b"x" * 500], {"inference_header_content_length": 9}, "/v2", 200),
        ([b"x" * 501], {"inference_header_content_length": 9}, "/v2", 503),
        ([b"x" * 101], {"inference_header_content_length": "+9"}, "/v2", 413),
        ([b"x"], {"sec_fetch_site": "same-origin"}, "/predict", 200),
        ([b"x"], {"sec_fetch_site": "cross-site"}, "/predict", 403),
        ([b"x" * 300], {"content_length": 300}, "/predict", 200),
        ([b"x" * 301], {}, "/predict", 413),
    ],
)
def test_body_is_limited(
    parts: list[bytes],
    headers: dict[str, Any],
    path: str,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, size in (("MAX_JSON", 100), ("MAX_PICTURE", 300), ("MAX_TOTAL", 500)):
        monkeypatch.setattr(limits, name, size)
    assert status(parts, headers, path) == expected


def test_body_that_stalls_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SILENCE", 0.01)
    assert status([b"x"], {}, ends=False) == 408


@pytest.mark.parametrize(("slowest", "expected"), [(0.01, 200), (1, 408)])
def test_drips_are_refused(slowest: float, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SLOWEST", slowest)
    clock = SimpleNamespace(monotonic=itertools.count(0, 10).__next__)
    monkeypatch.setattr(limits, "time", clock)
    assert status([b"x"] * 9, {}) == expected


@pytest.mark.parametrize("begin", [b"", b"GET / HTTP/1.1\r\nx", b"GET / HTTP/1.1\r\n\r\nG"])
def test_incomplete_headers_are_closed(begin: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "IDLE_SECONDS", 0.1)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def ask() -> bytes:
        config = uvicorn.Config(app, http=Connection, lifespan="off", log_config=None)
        loop, state = asyncio.get_running_loop(), ServerState()
        async with await loop.create_server(
            lambda: Connection(config, state, {}), "127.0.0.1", 0
        ) as server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer.write(begin)
            answer = await asyncio.wait_for(reader.read(), 60)
            writer.close()
        return answer

    assert asyncio.run(ask())[:12] == (b"HTTP/1.1 204" if begin.endswith(b"G") else b"")
