"""Objects of a library or a disk that keep a thread waiting, as a `Reader`."""

from collections.abc import Callable
from concurrent.futures import Executor
from typing import Protocol

from kfp_ddp.storage import event_loop
from kfp_ddp.storage.sources import Entry, Transient

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

    def ask(self, entry: Entry) -> None:
        """See `Reader.ask`; a library cannot be asked ahead."""

    async def whole(self, entry: Entry) -> bytes:
        """See `Reader.whole`."""
        body = bytearray()

        def take(block: bytes) -> None:
            body.extend(block)
            if len(body) > entry.size:
                raise Transient(f"{len(body)} bytes instead of {entry.size}")

        await self.pour(entry, 0, take)
        return bytes(body)

    async def pour(self, entry: Entry, offset: int, take: Callable[[bytes], None]) -> None:
        """See `Reader.pour`."""
        await event_loop.in_thread(self._threads, self._pour, entry, offset, take)

    def close(self) -> None:
        """See `Reader.close`; nothing stays open here."""

    def _pour(self, entry: Entry, offset: int, take: Callable[[bytes], None]) -> None:
        stream = self._open_stream(entry, offset)
        try:
            while block := stream.read(_BLOCK):
                take(block)
        finally:
            stream.close()
