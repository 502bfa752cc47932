"""Images of requests that wait together are computed together, and each gets its own answer."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kfp_ddp.serve.batches import Batches, FullError


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


def images(*values: int, side: int = 2) -> NDArray[np.uint8]:
    return np.stack([np.full((3, side, side), value, np.uint8) for value in values])


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
            asked: list[Coroutine[Any, Any, Any]] = [batches(one) for one in given]
            rest = asyncio.gather(*asked, return_exceptions=True)
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
        ([images(1), images(2, side=3), images(3, side=3), images(4)], [1, 2, 1]),
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
    assert isinstance(answers[2], FullError)
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
