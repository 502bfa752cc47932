"""The server: batches of requests, and its limits."""

import asyncio
import itertools
import threading
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import uvicorn
from numpy.typing import NDArray
from starlette.exceptions import HTTPException
from uvicorn.server import ServerState

from kfp_ddp.serve import limits
from kfp_ddp.serve.limits import MAX_BODY, BodyLimit, HttpConnection, InProgress
from kfp_ddp.serve.served import Batches, BusyError

JSON_SIZE = "inference_header_content_length"


class Held:
    """A model that waits to be let go; each image's logit is its first byte."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.begun = threading.Event()
        self.sizes: list[int] = []

    def __call__(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        self.begun.set()
        assert self.free.wait(60)
        if (images == 255).any():
            raise RuntimeError("cannot be computed")
        return images[:, 0, 0, :1].astype(np.float32)


def images(*values: int) -> NDArray[np.uint8]:
    return np.stack([np.full((3, 2, 2), value, np.uint8) for value in values])


def together(
    *given: NDArray[np.uint8], largest: int = 4, waiting: int = 100
) -> tuple[list[int], list[Any]]:
    """Ask for all while the model is busy with another; the sizes of its calls, and the answers."""
    model = Held()
    batches = Batches(model, largest, waiting, model.sizes.append)

    async def ask() -> list[Any]:
        async with asyncio.timeout(60):
            first = asyncio.create_task(batches(images(0)))
            await asyncio.to_thread(model.begun.wait)
            requested: list[Coroutine[Any, Any, Any]] = [batches(one) for one in given]
            rest = asyncio.gather(*requested, return_exceptions=True)
            await asyncio.sleep(0)
            model.free.set()
            await first
            return await rest

    answers = asyncio.run(ask())
    assert model.sizes[0] == 1
    return model.sizes[1:], [a if isinstance(a, Exception) else a.ravel().tolist() for a in answers]


@pytest.mark.parametrize(
    ("given", "calls"),
    [
        ([images(1), images(2, 3), images(4), images(5, 6), images(7)], [4, 3]),
        ([images(*range(1, 11)), images(20)], [4, 4, 3]),  # a large one is computed in parts
    ],
)
def test_what_waits_is_computed_at_once(given: list[NDArray[np.uint8]], calls: list[int]) -> None:
    assert together(*given) == (calls, [one[:, 0, 0, 0].tolist() for one in given])


def test_what_cannot_be_computed_is_told_to_who_asked_and_the_next_are_answered() -> None:
    sizes, answers = together(images(1, 2, 3, 255), images(4))
    assert sizes == [4, 1]
    assert str(answers[0]) == "cannot be computed"
    assert answers[1] == [4]


def test_no_more_waits_than_may() -> None:
    sizes, answers = together(images(1, 2), images(3), images(4), waiting=3)
    assert sizes == [3]
    assert answers[:2] == [[1, 2], [3]]
    assert isinstance(answers[2], BusyError)
    assert "3 images wait already" in str(answers[2])
    assert together(images(*range(9)), waiting=3)[1] == [list(range(9))]


def test_who_went_away_stops_nobody() -> None:
    model = Held()
    batches = Batches(model, 4, 100, model.sizes.append)

    async def ask() -> Any:
        gone = asyncio.create_task(batches(images(1)))
        await asyncio.to_thread(model.begun.wait)
        gone.cancel()
        stays = asyncio.create_task(batches(images(2)))
        with pytest.raises(asyncio.CancelledError):
            await gone
        model.free.set()
        return await stays

    assert asyncio.run(ask()).tolist() == [[2]]


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
    progress = InProgress()
    limit = BodyLimit(app, progress, "/predict")
    try:
        asyncio.run(limit(scope, receive, send))
    except HTTPException as error:
        return error.status_code
    finally:
        assert progress.bytes == 0
    return 200


@pytest.mark.parametrize(
    ("parts", "headers", "path", "expected"),
    [
        ([b"x" * 50, b"x" * 50], {}, "/v2", 200),
        ([b"x" * 50, b"x" * 51], {}, "/v2", 413),
        ([b"x"], {"content_length": 101}, "/v2", 413),
        ([b"x" * 500], {"content_length": 500, JSON_SIZE: 100}, "/v2", 200),
        ([b"x" * 500], {"content_length": 500, JSON_SIZE: 101}, "/v2", 413),
        ([b"x"], {"content_length": MAX_BODY + 1, JSON_SIZE: 9}, "/v2", 413),
        ([b"x" * 500], {JSON_SIZE: 9}, "/v2", 200),
        ([b"x" * 501], {JSON_SIZE: 9}, "/v2", 503),
        ([b"x"], {JSON_SIZE: "+9"}, "/v2", 400),
        ([b"x"], {JSON_SIZE: "9" * 5000}, "/v2", 400),
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
    monkeypatch.setattr(limits, "READ_TIMEOUT", 0.01)
    assert status([b"x"], {}, ends=False) == 408


@pytest.mark.parametrize(("slowest", "expected"), [(0.01, 200), (1, 408)])
def test_drips_are_refused(slowest: float, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SLOWEST", slowest)
    clock = SimpleNamespace(monotonic=itertools.count(0, 10).__next__)
    monkeypatch.setattr(limits, "time", clock)
    assert status([b"x"] * 9, {}) == expected


@pytest.mark.parametrize("begin", [b"", b"GET / HTTP/1.1\r\nx", b"GET / HTTP/1.1\r\n\r\nG"])
def test_incomplete_headers_are_closed(begin: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    first = not begin.endswith(b"G")
    monkeypatch.setattr(limits, "FIRST_SECONDS" if first else "IDLE_SECONDS", 0.1)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def ask() -> bytes:
        config = uvicorn.Config(app, http=HttpConnection, lifespan="off", log_config=None)
        loop, state = asyncio.get_running_loop(), ServerState()
        async with await loop.create_server(
            lambda: HttpConnection(config, state, {}), "127.0.0.1", 0
        ) as server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer.write(begin)
            answer = await asyncio.wait_for(reader.read(), 60)
            writer.close()
        return answer

    assert asyncio.run(ask())[:12] == (b"" if first else b"HTTP/1.1 204")
