"""Archives read in large pieces, ahead of the images in them: what slow storage does best.

A piece goes into the page cache, which all loaders of a machine share, and from there each takes
its images in any order. What of it the machine drops again costs time, never a different image.
"""

import contextlib
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from kfp_ddp.training.shards import HEADER, Slices, pread

PIECE = 2 << 20
"""Bytes that are read at once."""
_GAP = PIECE // 8
"""Bytes of other images that are rather read than left out."""
_AT_ONCE = 4
_WAITING = 8

Piece = tuple[int, int]
"""The first and the last of images that lie one after the other, as positions in the index."""


def runs(slices: Slices, positions: Sequence[int]) -> list[range]:
    """Which of these positions, sorted as they are stored, make a piece: ranges of `positions`."""
    found: list[range] = []
    begin, shard, start, end = 0, -1, 0, 0
    for at, position in enumerate(positions):
        offset = slices.offsets[position]
        close = shard == slices.shards[position] and 0 <= offset - end <= _GAP
        if not close or offset + slices.sizes[position] - start > PIECE:
            if at > begin:
                found.append(range(begin, at))
            begin, shard, start = at, slices.shards[position], offset
        end = offset + slices.sizes[position]
    return [*found, range(begin, len(positions))] if positions else []


def in_store_order(slices: Slices) -> list[int]:
    """All positions, by archive and by place in it."""
    places = zip(slices.shards, slices.offsets, range(len(slices.shards)), strict=True)
    return [position for _, _, position in sorted(places)]


def pieces(slices: Slices, positions: Sequence[int]) -> list[Piece]:
    """The pieces that hold these images, which are sorted as they are stored."""
    return [(positions[run[0]], positions[run[-1]]) for run in runs(slices, positions)]


class ReadAhead:
    """Reads pieces in threads of this process, some at a time."""

    def __init__(self, slices: Slices) -> None:
        self._slices = slices
        self._pool: ThreadPoolExecutor | None = None
        self._coming: deque[Future[None]] = deque()

    def begin(self, ahead: Sequence[Piece]) -> None:
        """Begin to read these, and wait while there are more than a few to come."""
        for piece in ahead:
            self._pool = self._pool or ThreadPoolExecutor(_AT_ONCE)
            while len(self._coming) >= _WAITING:
                self._coming.popleft().result()
            self._coming.append(self._pool.submit(self._read, *piece))

    def _read(self, first: int, last: int) -> None:
        slices = self._slices
        begin = slices.offsets[first] - HEADER
        length = slices.offsets[last] + slices.sizes[last] - begin
        with contextlib.suppress(OSError):  # said where an image of it is read
            pread(slices.files[slices.shards[first]], length, begin)
