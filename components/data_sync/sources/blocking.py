"""Objects of a library or a disk that keep a thread waiting, as a `Reader`."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Protocol

from kfp_ddp.components.data_sync.sources import Entry

_BLOCK = 1 << 20


class Stream(Protocol):
    """An open object."""

    def read(self, size: int = -1, /) -> bytes:
        """Up to `size` bytes, b'' at the end.

        Raises:
            Transient: see `Reader.read`.
        """

    def close(self) -> None:
        """Give it up, read or not."""


class BlockingReader:
    """Opens and reads in these threads; see `Reader`."""

    def __init__(self, open_stream: Callable[[Entry, int], Stream], threads: Executor) -> None:
        self._open_stream, self._threads = open_stream, threads
        self._stream: Stream | None = None
        self._first, self._ended = b"", False

    def ask(self, entry: Entry) -> None:
        """See `Reader.ask`; a library cannot be asked ahead."""

    async def open(self, entry: Entry, offset: int) -> None:
        """See `Reader.open`; the first block is read in the same go."""
        self.close()
        loop = asyncio.get_running_loop()
        self._first = await loop.run_in_executor(self._threads, self._start, entry, offset)

    async def read(self) -> list[bytes]:
        """See `Reader.read`."""
        data, self._first = self._first, b""
        if not data and not self._ended and self._stream is not None:
            loop = asyncio.get_running_loop()
            data = await loop.run_in_executor(self._threads, self._stream.read, _BLOCK)
        return [data] if data else []

    def close(self) -> None:
        """See `Reader.close`."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _start(self, entry: Entry, offset: int) -> bytes:
        self._stream = self._open_stream(entry, offset)
        wanted = min(_BLOCK, entry.size - offset) + 1  # so that what is longer than listed shows
        data = self._stream.read(wanted) if entry.size else b""
        self._ended = len(data) < wanted
        return data
