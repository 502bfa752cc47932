"""Small objects over many connections, all in one thread.

A thread for each connection spends more on waiting for the interpreter's lock than on a file of
20 KB; here one event loop serves them all. Only a slow disk gets threads, to write in.
"""

import asyncio
import http.client
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from threading import Event

from kfp_ddp.components.data_sync.connection import Endpoint
from kfp_ddp.components.data_sync.line import Line
from kfp_ddp.components.data_sync.listing import Listing
from kfp_ddp.components.data_sync.meter import Meter, Throttle
from kfp_ddp.components.data_sync.retry import Retry
from kfp_ddp.components.data_sync.sources import Changed, Transient
from kfp_ddp.components.data_sync.sources.over_http import HttpObjects

SLOW_WRITE = 1e-3
"""Seconds for a small file above which writes overlap: a network disk takes 1 to 10 ms."""


@dataclass
class Swarm:
    """Moves small objects; `accept` checks a whole body and stores it, from any thread."""

    objects: HttpObjects
    url: str
    listing: Listing
    accept: Callable[[int, bytes], None]
    retry: Retry
    throttle: Throttle
    meter: Meter
    worker: int
    connections: int
    changed: list[str]
    stop: Event

    def run(self, feed: deque[int]) -> None:
        """Move all of the feed; those that are no longer as listed end up in `changed`.

        Raises:
            InputError: an object could not be had, or the target not be written.
        """
        with ThreadPoolExecutor(self.connections) as self._writers:
            self._write_seconds = 0.0
            asyncio.run(self._run(feed))

    async def _run(self, feed: deque[int]) -> None:
        count = min(self.connections, len(feed))
        endpoint = Endpoint(self.objects.endpoint)
        lines = [Line(endpoint, self.objects.timeout) for _ in range(count)]
        watch = asyncio.create_task(self._watch(lines))
        try:
            work = []
            for line in lines:
                work.append(asyncio.create_task(self._work(line, feed)))
                await asyncio.sleep(0)  # the first ask while the last still shake hands
            await asyncio.gather(*work)
        finally:
            watch.cancel()
            for line in lines:
                line.close()

    async def _watch(self, lines: list[Line]) -> None:
        """Break the silence of connections that hang, and all of them when it is time to stop."""
        while True:
            await asyncio.sleep(min(1.0, self.objects.timeout / 4))
            for line in lines:
                line.check()
                if self.stop.is_set():
                    line.fail(ConnectionAbortedError("stopped"))

    async def _work(self, line: Line, feed: deque[int]) -> None:
        while feed and not self.stop.is_set():
            index = feed.popleft()
            try:
                await self._fetch(line, index)
            except Changed:
                self.changed.append(self.listing.origin(index))

    async def _fetch(self, line: Line, index: int) -> None:
        for attempt in range(self.retry.attempts):
            try:
                await self._move(line, index)
            except Transient as error:
                problem = error
            else:
                self.meter.files += 1
                return
            self.meter.retries += 1
            await asyncio.sleep(self.retry.delay(attempt))
            if self.stop.is_set():
                return
        raise self.retry.exhausted(f"{self.listing.origin(index)!r} of {self.url}", problem)

    async def _move(self, line: Line, index: int) -> None:
        size = self.listing.sizes[index]
        if pause := self.throttle.delay(size):
            await asyncio.sleep(pause)
        data = await self._body(line, index)
        await self._store(index, data)
        self.meter.bytes += size

    async def _body(self, line: Line, index: int) -> bytes:
        name = self.listing.origin(index)
        target, headers = self.objects.request(name, self.listing.generations[index], 0)
        try:
            response = await line.get(target, headers)
            body = response.read()
        except (OSError, http.client.HTTPException) as error:
            line.close()
            raise Transient(f"{type(error).__name__}: {error}") from error
        if response.status != HTTPStatus.OK:
            raise self.objects.refusal(name, response.status, body, headers)
        return body

    async def _store(self, index: int, data: bytes) -> None:
        if self._write_seconds > SLOW_WRITE:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._writers, self.accept, index, data)
            return
        began = time.perf_counter()
        self.accept(index, data)
        took = min(time.perf_counter() - began, 4 * SLOW_WRITE)  # one hiccup is no slow disk
        self._write_seconds += (took - self._write_seconds) / 16
