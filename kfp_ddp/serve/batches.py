"""Dynamic batching: compute the images of concurrent requests together."""

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
    """The queue is full."""


class Batches:
    """Batches queued images whenever the model is free, and collects the next ones meanwhile."""

    def __init__(
        self, model: Logits, largest: int, waiting: int, observe: Callable[[int], None]
    ) -> None:
        """Call `model` in one thread with at most `largest` images; an empty queue accepts any."""
        self._model, self._largest, self._limit, self._observe = model, largest, waiting, observe
        self._thread = ThreadPoolExecutor(1, "model")
        self._queue: deque[tuple[Images, asyncio.Future[Floats]]] = deque()
        self._waiting = 0
        self._worker: asyncio.Task[None] | None = None

    async def __call__(self, images: Images) -> Floats:
        """Return the logits of images; raise FullError if the queue is full."""
        if self._waiting and self._waiting + len(images) > self._limit:
            raise FullError(f"{self._waiting} images wait already: retry later")
        loop = asyncio.get_running_loop()
        parts = [images[at : at + self._largest] for at in range(0, len(images), self._largest)]
        futures = [loop.create_future() for _ in parts]
        self._queue.extend(zip(parts, futures, strict=True))
        self._waiting += len(images)
        if self._worker is None or self._worker.done():
            self._worker = loop.create_task(self._work())
        return np.concatenate(await asyncio.gather(*futures))

    async def _work(self) -> None:
        """Compute until the queue is empty."""
        loop = asyncio.get_running_loop()
        while self._queue:
            batch = self._next()
            try:
                images = np.concatenate([part for part, _ in batch])
                self._observe(len(images))
                result = await loop.run_in_executor(self._thread, self._model, images)
                answers = np.split(result, np.cumsum([len(part) for part, _ in batch])[:-1])
            except Exception as error:  # noqa: BLE001  each client gets it
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, future), answer in zip(batch, answers, strict=True):
                if not future.done():  # the client may have disconnected
                    future.set_result(answer)

    def _next(self) -> list[tuple[Images, asyncio.Future[Floats]]]:
        """Return the next batch: images of one size, in the order of arrival."""
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
