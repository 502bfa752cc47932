"""Download many objects at once, each verified over its whole body before it counts."""

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import google_crc32c

from kfp_ddp.components.data_sync.listing import Listing
from kfp_ddp.components.data_sync.meter import Meter, Throttle
from kfp_ddp.components.data_sync.retry import Retry
from kfp_ddp.components.data_sync.sources import Body, Changed, Reader, Source, Transient
from kfp_ddp.components.data_sync.swarm import Swarm

SMALL = 1 << 20
"""Bodies up to this many bytes are verified in memory, before a file is opened."""
_CHUNK = 1 << 20


class Stage(Protocol):
    """Where verified bodies go; called by many threads, once an object."""

    def put(self, index: int, data: bytes, crc: int) -> None:
        """Write a whole, verified body."""

    def begin(self, index: int) -> tuple[int, int]:
        """Open a place for a large body: a file descriptor, and where in it the body starts."""

    def finish(self, index: int, descriptor: int, crc: int) -> None:
        """The body at that place is whole and verified; closes the descriptor."""

    def drop(self, index: int, descriptor: int) -> None:
        """The body failed for good; closes the descriptor."""


class Transfer:
    """Moves objects of a source to a stage over many connections at once.

    Large bodies, and those of a source that is asked through a library, have a thread for each
    connection; small ones over HTTP share one thread.
    """

    def __init__(
        self,
        source: Source,
        listing: Listing,
        stage: Stage,
        *,
        concurrency: int = 64,
        bandwidth: float = 0,
        retry: Retry | None = None,
    ) -> None:
        self._source, self._listing, self._stage = source, listing, stage
        self._connections = max(1, min(concurrency, source.max_workers))
        self._retry, self._throttle = retry or Retry(), Throttle(bandwidth)
        self._stop = threading.Event()
        self._errors: list[BaseException] = []
        self.changed: list[str] = []
        self.meter = Meter()

    def run(self, indices: Sequence[int]) -> None:
        """Move these objects; those that are no longer as listed end up in `changed`.

        Raises:
            InputError: an object could not be had, or the target not be written.
        """
        # Large ones first, so that none is left for the end alone.
        order = sorted(indices, key=self._listing.sizes.__getitem__, reverse=True)
        alone, together = order, list[int]()
        if self._source.objects is not None and self._connections > 1:
            alone = [index for index in order if self._listing.sizes[index] > SMALL]
            together = order[len(alone) :]
        threads = self._threads(deque(alone), deque(together))
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.5)
        finally:
            self._stop.set()
        if self._errors:
            raise self._errors[0]

    def _threads(self, alone: deque[int], together: deque[int]) -> list[threading.Thread]:
        """Threads for both kinds, which share the connections when there are both."""
        share = self._connections // 2 if together else self._connections
        count = min(share, len(alone))
        work = [(self._work, worker, alone) for worker in range(count)]
        if together:
            work.append((self._swarm, count, together))
        return [
            threading.Thread(target=self._guard, args=arguments, daemon=True) for arguments in work
        ]

    def _guard(
        self, work: Callable[[int, deque[int]], None], worker: int, feed: deque[int]
    ) -> None:
        try:
            work(worker, feed)
        except BaseException as error:  # noqa: BLE001 (handed to the caller's thread)
            self._errors.append(error)
            self._stop.set()

    def _swarm(self, worker: int, feed: deque[int]) -> None:
        assert self._source.objects is not None
        Swarm(
            self._source.objects,
            self._source.url,
            self._listing,
            self._accept,
            self._retry,
            self._throttle,
            self.meter,
            worker,
            self._connections - worker,
            self.changed,
            self._stop,
        ).run(feed)

    def _work(self, worker: int, feed: deque[int]) -> None:
        reader = self._source.reader()
        try:
            while not self._stop.is_set():
                try:
                    index = feed.popleft()
                except IndexError:
                    break
                try:
                    self._fetch(worker, reader, index)
                except Changed:
                    self.changed.append(self._listing.origin(index))
        finally:
            reader.close()

    def _fetch(self, worker: int, reader: Reader, index: int) -> None:
        move = self._small if self._listing.sizes[index] <= SMALL else self._large
        for attempt in range(self._retry.attempts):
            try:
                move(worker, reader, index)
            except Transient as error:
                problem = error
            else:
                self.meter.files += 1
                return
            self.meter.retries += 1
            if self._stop.wait(self._retry.delay(attempt)):
                return
        origin = self._listing.origin(index)
        raise self._retry.exhausted(f"{origin!r} of {self._source.url}", problem)

    def _open(self, reader: Reader, index: int, offset: int) -> Body:
        listing = self._listing
        return reader.open(
            listing.origin(index),
            listing.generations[index],
            listing.tags[index] if listing.tags else "",
            listing.sizes[index],
            offset,
        )

    def _small(self, worker: int, reader: Reader, index: int) -> None:
        size = self._listing.sizes[index]
        self._pause(size)
        body = self._open(reader, index, 0)
        try:
            data = body.read() if size else b""
        finally:
            body.close()
        self._accept(index, data)
        self.meter.bytes += size

    def _pause(self, size: int) -> None:
        if pause := self._throttle.delay(size):
            self._stop.wait(pause)

    def _accept(self, index: int, data: bytes) -> None:
        """Check a whole body and hand it to the stage."""
        crc = google_crc32c.value(data)
        self._check(index, len(data), crc)
        self._stage.put(index, data, crc)

    def _large(self, worker: int, reader: Reader, index: int) -> None:
        """Stream to the stage; a broken body is continued, a wrong one starts again from 0."""
        descriptor, start = self._stage.begin(index)
        try:
            crc = self._stream(worker, reader, index, descriptor, start)
        except BaseException:
            self._stage.drop(index, descriptor)
            raise
        self._stage.finish(index, descriptor, crc)

    def _stream(self, worker: int, reader: Reader, index: int, descriptor: int, start: int) -> int:
        size, offset, crc, breaks = self._listing.sizes[index], 0, 0, 0
        while offset < size:
            try:
                body = self._open(reader, index, offset)
                try:
                    while offset < size and (data := body.read(min(_CHUNK, size - offset))):
                        self._pause(len(data))
                        write_all(descriptor, data, start + offset)
                        crc, offset = google_crc32c.extend(crc, data), offset + len(data)
                        self.meter.bytes += len(data)
                        breaks = 0
                        if self._stop.is_set():
                            raise Transient("stopped")
                finally:
                    body.close()
                if offset < size:
                    raise Transient(f"the body ended {size - offset} bytes early")
            except Transient:
                breaks += 1
                if (
                    self._stop.is_set()
                    or not self._source.resumes
                    or breaks >= self._retry.attempts
                ):
                    raise
                self.meter.retries += 1
                self._stop.wait(self._retry.delay(breaks))
        self._check(index, offset, crc)
        return crc

    def _check(self, index: int, size: int, crc: int) -> None:
        """The one rule: size and crc32c of the whole body are those of the listing."""
        listing = self._listing
        if size != listing.sizes[index]:
            raise Transient(f"{size} bytes instead of {listing.sizes[index]}")
        if not listing.tags and crc != listing.crcs[index]:
            raise Transient(f"crc32c {crc:08x} instead of {listing.crcs[index]:08x}")
        listing.crcs[index] = crc


def write_all(descriptor: int, data: bytes, offset: int) -> None:
    """Write the bytes at an offset, however many calls it takes.

    Raises:
        OSError: the disk is full, or failing.
    """
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written
