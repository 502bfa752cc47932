"""Download many objects at once, each verified over its whole body before it counts."""

import os
import random
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import google_crc32c

from kfp_ddp.components.data_sync.listing import Listing
from kfp_ddp.components.data_sync.sources import Body, Changed, Reader, Source, Transient
from kfp_ddp.training.errors import InputError

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


@dataclass
class Retry:
    """How stubbornly an object is asked for: attempts, first and longest pause in seconds."""

    attempts: int = 8
    pause: float = 0.25
    longest: float = 20.0

    def wait(self, attempt: int, stop: threading.Event | None = None) -> None:
        """Exponential back-off with full jitter."""
        (stop or threading.Event()).wait(
            random.uniform(0, min(self.longest, self.pause * 2**attempt))
        )


class Throttle:
    """A bandwidth limit in bytes a second over all threads; 0 for none."""

    def __init__(self, rate: float) -> None:
        self._rate, self._lock, self._free_at = rate, threading.Lock(), 0.0

    def take(self, count: int, stop: threading.Event) -> None:
        """Wait until `count` more bytes may pass."""
        if not self._rate:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + count / self._rate
            pause = self._free_at - now
        stop.wait(pause)


class Meter:
    """What has arrived so far; each worker counts in a slot of its own."""

    def __init__(self, workers: int) -> None:
        self._files, self._bytes, self._retries = ([0] * workers for _ in range(3))

    def add(self, worker: int, size: int) -> None:
        """Bytes that arrived."""
        self._bytes[worker] += size

    def done(self, worker: int) -> None:
        """One more whole file."""
        self._files[worker] += 1

    def retried(self, worker: int) -> None:
        """One more attempt that failed."""
        self._retries[worker] += 1

    files = property(lambda self: sum(self._files))
    bytes = property(lambda self: sum(self._bytes))
    retries = property(lambda self: sum(self._retries))


class Transfer:
    """A pool of threads, each with one connection, that moves objects of a source to a stage."""

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
        self._workers = max(1, min(concurrency, source.max_workers))
        self._retry, self._throttle = retry or Retry(), Throttle(bandwidth)
        self._stop = threading.Event()
        self._errors: list[BaseException] = []
        self.changed: list[str] = []
        self.meter = Meter(self._workers)

    def run(self, indices: Sequence[int]) -> None:
        """Move these objects; those that are no longer as listed end up in `changed`.

        Raises:
            InputError: an object could not be had, or the target not be written.
        """
        # Large ones first, so that none is left for the end alone.
        order = sorted(indices, key=self._listing.sizes.__getitem__, reverse=True)
        feed = deque(order)
        count = min(self._workers, len(order))
        threads = [
            threading.Thread(target=self._work, args=(worker, feed), daemon=True)
            for worker in range(count)
        ]
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
        except BaseException as error:  # noqa: BLE001 (handed to the caller's thread)
            self._errors.append(error)
            self._stop.set()
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
                self.meter.done(worker)
                return
            self.meter.retried(worker)
            if self._stop.is_set():
                return
            self._retry.wait(attempt, self._stop)
        raise InputError(
            f"cannot read {self._listing.origin(index)!r} of {self._source.url}: {problem}, "
            f"{self._retry.attempts} times; try again later"
        )

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
        self._throttle.take(size, self._stop)
        body = self._open(reader, index, 0)
        try:
            data = body.read() if size else b""
        finally:
            body.close()
        crc = google_crc32c.value(data)
        self._check(index, len(data), crc)
        self.meter.add(worker, size)
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
                        self._throttle.take(len(data), self._stop)
                        write_all(descriptor, data, start + offset)
                        crc, offset = google_crc32c.extend(crc, data), offset + len(data)
                        self.meter.add(worker, len(data))
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
                self.meter.retried(worker)
                self._retry.wait(breaks, self._stop)
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
