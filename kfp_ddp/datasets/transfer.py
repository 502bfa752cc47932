"""Download many objects at once, each verified by the checksum of its body."""

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import google_crc32c

from kfp_ddp.datasets.context import Context, SyncCounters, Throttle
from kfp_ddp.datasets.disk import write_all, writing
from kfp_ddp.datasets.stage import FileStage
from kfp_ddp.storage import event_loop
from kfp_ddp.storage.source import Damaged, Entry, Reader, Transient

SMALL = 1 << 20
"""Bodies up to this many bytes are verified in memory, before a file is opened."""
SLOW_WRITE = 1e-3
"""Seconds for a small file above which writes overlap: a network disk takes 1 to 10 ms."""
PROGRESS = 1 << 16
"""Bytes of a body that must come before a break counts as the first again."""

STREAMS = 2
"""Initial number of connections: these saturate two processors that decrypt and write."""
BUSY = 0.8
"""Number of busy processors above which more connections may only wait."""
MORE = 1.2
"""Growth of the rate that twice as many connections need while the processors are busy."""
_PERIOD = 0.1

Job = tuple[int, Entry]


class Transfer:
    """Downloads objects to a stage: small ones in one thread, large or slow ones in others."""

    def __init__(self, context: Context, stage: FileStage) -> None:
        self._source = context.source
        self._listing = stage.listing
        self._stage = stage
        self._connections = min(context.options.concurrency, context.source.max_workers)
        self._retry = context.retry
        self._throttle = Throttle(context.options.bandwidth_mb * 1e6)
        self._feed = deque[int]()
        self._write_seconds = 0.0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self.meter = SyncCounters()

    def run(self, indices: Sequence[int]) -> None:
        """Download these objects; raise Changed if one is not as listed any more, KfpDdpError."""
        # Large ones first, so that none of them is the last one alone.
        self._feed.extend(sorted(indices, key=self._listing.sizes.__getitem__, reverse=True))
        with ThreadPoolExecutor(self._connections) as self._threads:
            event_loop.run(self._run())

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._start_worker(group))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors.exceptions[0].__cause__

    async def _start_worker(self, group: asyncio.TaskGroup) -> None:
        """Open all connections for small bodies; for large ones, add more while they bring more."""
        workers = 0
        growth = Growth(lambda: self.meter.bytes)
        while self._feed and workers < self._connections:
            target = max(workers, STREAMS) if self._large_next else self._connections
            more = min(target, self._connections - workers, len(self._feed))
            for _ in range(more):
                group.create_task(self._work())
            workers += more
            await asyncio.sleep(0)  # each takes its first object
            while self._large_next and not await growth.period():
                pass

    @property
    def _large_next(self) -> bool:
        return bool(self._feed) and self._listing.sizes[self._feed[0]] > SMALL

    async def _work(self) -> None:
        reader = self._source.reader(self._threads)
        try:
            job = self._next()
            while job is not None:
                job = await self._download(reader, job)
        except BaseException:
            self._stop.set()
            raise
        finally:
            reader.close()

    def _next(self, reader: Reader | None = None) -> Job | None:
        """Take an object from the feed; the reader requests it at once."""
        if not self._feed:
            return None
        listing = self._listing
        index = self._feed.popleft()
        tag = listing.tags[index] if listing.tags else ""
        entry = Entry(listing.origin(index), listing.generations[index], tag, listing.sizes[index])
        if reader is not None:
            reader.prefetch(entry)
        return index, entry

    async def _download(self, reader: Reader, job: Job) -> Job | None:
        """Download one object with retries; return the next, which is requested meanwhile."""
        index, entry = job
        for attempt in range(self._retry.attempts):
            if attempt:
                await asyncio.sleep(self._retry.delay(attempt))
            following = None
            try:
                if entry.size > SMALL:
                    await self._large(reader, index, entry)
                    following = self._next(reader)
                else:
                    if pause := self._pause(entry.size):
                        await asyncio.sleep(pause)
                    data = await reader.read(entry)
                    if self._listing.sized and len(data) != entry.size:
                        raise Damaged(f"{len(data)} bytes instead of {entry.size}")
                    following = self._next(reader)
                    await self._put(index, data)
            except Transient as error:
                problem = error
            else:
                self.meter.files += 1
                return following
            reader.close()
            if following is not None:
                self._feed.appendleft(following[0])
            self.meter.retries += 1
        raise self._retry.exhausted("read", f"{entry.name!r} of {self._source.url}", problem)

    async def _put(self, index: int, data: bytes) -> None:
        """Check a small body and store it: at once, or in a thread where the disk is slow."""
        if self._write_seconds > SLOW_WRITE:
            await event_loop.in_thread(self._threads, self._accept, index, data)
            return
        began = time.perf_counter()
        self._accept(index, data)
        took = min(time.perf_counter() - began, 4 * SLOW_WRITE)  # one hiccup is no slow disk
        self._write_seconds += (took - self._write_seconds) / 16

    def _accept(self, index: int, data: bytes) -> None:
        crc = google_crc32c.value(data)
        self._check(index, crc)
        self._stage.put(index, data, crc)

    def _check(self, index: int, crc: int) -> None:
        listing = self._listing
        if listing.lists_crc and crc != listing.crcs[index]:
            raise Damaged(f"crc32c {crc:08x} instead of {listing.crcs[index]:08x}")
        listing.crcs[index] = crc

    async def _large(self, reader: Reader, index: int, entry: Entry) -> None:
        """Stream to the stage; a broken body is continued, a wrong one starts again from 0."""
        descriptor, start = await event_loop.in_thread(self._threads, self._stage.begin, index)
        target = _Target(descriptor, start)
        try:
            await self._stream(reader, index, entry, target)
            self._check(index, target.crc)
        except BaseException:
            self._stage.drop(index, descriptor)
            raise
        finish = self._stage.finish
        await event_loop.in_thread(self._threads, finish, index, descriptor, target.crc)

    async def _stream(self, reader: Reader, index: int, entry: Entry, target: "_Target") -> None:
        def take(block: bytes) -> None:
            if target.size + len(block) > entry.size:
                raise Damaged(f"more than {entry.size} bytes")
            if self._stop.wait(self._pause(len(block))):
                raise Transient("stopped")
            with writing(self._stage.path(index)):  # a reader would retry an OSError
                target.write(block)

        breaks = 0
        while target.size < entry.size:
            before = target.size
            try:
                await reader.pour(entry, target.size, take)
                if target.size < entry.size:
                    raise Transient(f"the body ended {entry.size - target.size} bytes early")
            except Transient as error:
                breaks = breaks + 1 if target.size < before + PROGRESS else 1
                resumes = self._source.resumes and not isinstance(error, Damaged)
                if not resumes or breaks >= self._retry.attempts:
                    raise
                reader.close()
                self.meter.retries += 1
                await asyncio.sleep(self._retry.delay(breaks))

    def _pause(self, size: int) -> float:
        """Count bytes; return the seconds that they have to wait."""
        with self._lock:
            self.meter.bytes += size
            return self._throttle.delay(size)


class _Target:
    """The file of a large body, with the size and crc32c of what is written."""

    def __init__(self, descriptor: int, start: int) -> None:
        self._descriptor = descriptor
        self._start = start
        self.size = 0
        self.crc = 0

    def write(self, block: bytes) -> None:
        self.crc = google_crc32c.extend(self.crc, block)
        write_all(self._descriptor, block, self._start + self.size)
        self.size += len(block)


class Growth:
    """Decides when to double the large downloads at once: too many threads contend for the lock."""

    def __init__(self, arrived: Callable[[], int]) -> None:
        """Watch a transfer that has received `arrived()` bytes."""
        self._arrived = arrived
        self._best = 0.0

    async def period(self) -> bool:
        """Measure for a while; return whether more connections are useful."""
        began = time.perf_counter()
        used = time.process_time()
        before = self._arrived()
        await asyncio.sleep(_PERIOD)
        seconds = time.perf_counter() - began
        busy = (time.process_time() - used) / seconds
        rate = (self._arrived() - before) / seconds
        return self.more_connections_help(busy, rate)

    def more_connections_help(self, busy: float, rate: float) -> bool:
        """Return whether more connections are useful, by busy processors and bytes a second."""
        if not rate:  # before the first response
            return False
        if busy < BUSY:
            return True
        more = rate > MORE * self._best
        self._best = rate if more else math.inf
        return more
