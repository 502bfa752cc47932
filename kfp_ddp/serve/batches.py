"""Images of requests that wait at the same time, computed together."""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from kfp_ddp.models.onnx_runtimes import Logits

Images = NDArray[np.uint8]
Floats = NDArray[np.float32]


class FullError(Exception):
    """More images wait than may."""


class Batches:
    """Gives a model all that waits, up to a number of images, whenever it is free.

    Nothing waits for others to come: while one batch is computed, the next one gathers.
    """

    def __init__(
        self, model: Logits, largest: int, waiting: int, told: Callable[[int], None]
    ) -> None:
        """Begin with nothing.

        Args:
            model: Called in a thread of its own, one call at a time.
            largest: Images in one call, at most.
            waiting: Images that may wait, at most; a request is taken whole where none waits.
            told: Of the images of each call.
        """
        self._model, self._largest, self._limit, self._told = model, largest, waiting, told
        self._thread = ThreadPoolExecutor(1, "model")
        self._queue: deque[tuple[Images, asyncio.Future[Floats]]] = deque()
        self._waiting = 0
        self._worker: asyncio.Task[None] | None = None

    async def __call__(self, images: Images) -> Floats:
        """The logits of some images.

        Raises:
            FullError: too many wait already.
        """
        if self._waiting and self._waiting + len(images) > self._limit:
            raise FullError(f"{self._waiting} images wait already: ask again later")
        loop = asyncio.get_running_loop()
        parts = [images[at : at + self._largest] for at in range(0, len(images), self._largest)]
        futures = [loop.create_future() for _ in parts]
        self._queue.extend(zip(parts, futures, strict=True))
        self._waiting += len(images)
        if self._worker is None or self._worker.done():
            self._worker = loop.create_task(self._work())
        return np.concatenate(await asyncio.gather(*futures))

    async def _work(self) -> None:
        """Compute until nothing waits."""
        loop = asyncio.get_running_loop()
        while self._queue:
            batch = self._next()
            images = np.concatenate([part for part, _ in batch])
            self._told(len(images))
            try:
                found = await loop.run_in_executor(self._thread, self._model, images)
                answers = np.split(found, np.cumsum([len(part) for part, _ in batch])[:-1])
            except Exception as error:  # noqa: BLE001  whatever it is, those who asked get it
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, future), answer in zip(batch, answers, strict=True):
                if not future.done():  # who asked may have gone
                    future.set_result(answer)

    def _next(self) -> list[tuple[Images, asyncio.Future[Floats]]]:
        """What fits into one call: images of one size, in the order in which they came."""
        batch = [self._queue.popleft()]
        count, shape = len(batch[0][0]), batch[0][0].shape[1:]
        while self._queue:
            images = self._queue[0][0]
            if count + len(images) > self._largest or images.shape[1:] != shape:
                break
            batch.append(self._queue.popleft())
            count += len(images)
        self._waiting -= count
        return batch
