"""Images that are computed and not stored: synthetic://CLASSESxIMAGES@PIXELS?seed=N.

They are for trying GPUs, network and storage without a bucket, as torchvision's FakeData is. An
image is the coarse pattern of its class with noise, which a network learns. It is an uncompressed
BMP, whose size is known from the address, and which needs no library to write.
"""

import hashlib
import re
import struct
from collections.abc import Iterator
from concurrent.futures import Executor
from itertools import pairwise

from kfp_ddp.core.errors import InputError
from kfp_ddp.storage.folder_source import FolderReader
from kfp_ddp.storage.kinds import SYNTHETIC
from kfp_ddp.storage.listing import Listing
from kfp_ddp.storage.source import MAX_OBJECTS, SourceOptions

_HEADER = struct.Struct("<2sIII IiiHHIIiiII")
_CELLS = 8
"""Squares of one colour in a row of the pattern."""
_LEAST = 4
"""Images of a class, so that it has some to train on and some to validate."""
_NOISE = 0x3F
_VERSION = "1"
"""Of the content: another one is another version of the dataset."""


class SyntheticSource:
    """`<class>/<number>.bmp` with equally many images of each class, and no split."""

    exposed = False
    resumes = True
    max_workers = 16

    def __init__(self, url: str, options: SourceOptions) -> None:
        self.url = url
        numbers = re.fullmatch(SYNTHETIC, url.partition("://")[2])
        if numbers is None:
            raise InputError(f"source {url!r} is not synthetic://CLASSESxIMAGES@PIXELS?seed=N")
        self.classes, self.images, self.pixels, self.seed = (
            int(number or 0) for number in numbers.groups()
        )
        if not _LEAST * self.classes <= self.images <= MAX_OBJECTS:
            raise InputError(
                f"source {url!r} has {self.images:,} images of {self.classes:,} classes: give "
                f"{_LEAST} or more for each class, and at most {MAX_OBJECTS:,}"
            )
        edges = [cell * self.pixels // _CELLS for cell in range(_CELLS + 1)]
        self._widths = [right - left for left, right in pairwise(edges)]
        self._row = -(-3 * self.pixels // 4) * 4
        self.size = _HEADER.size + self._row * self.pixels

    def listing(self) -> Listing:
        """Name all images, without computing one; see `Source.listing`."""
        listing = Listing(lists_crc=False)
        wide = len(str(self.classes))
        digits = len(str(self.images))
        for label in range(self.classes):
            for number in range(label, self.images, self.classes):
                name = f"c{label:0{wide}}/{number:0{digits}}.bmp"
                listing.add(name, self.size, 0, tag=f"{_VERSION}-{self.seed}-{number}")
        return listing

    def reader(self, threads: Executor | None) -> FolderReader:
        """Return a reader, which computes in `threads`."""
        return FolderReader(self, threads)

    def blocks(self, name: str, pin: int, offset: int) -> Iterator[bytes]:
        """Yield a listed image from an offset on: noise of 6 bits on the colours of its class."""
        pattern = b""
        for cell, height in enumerate(self._widths):
            colours = self._random(f"{name.partition('/')[0]}/{cell}", 3 * _CELLS)
            scaled = bytes(value * (0xFF - _NOISE) // 0xFF for value in colours)
            row = (
                scaled[3 * column : 3 * column + 3] * width
                for column, width in enumerate(self._widths)
            )
            pattern += b"".join(row).ljust(self._row, b"\0") * height
        size = len(pattern)
        noise = int.from_bytes(self._random(name, size)) & int.from_bytes(bytes([_NOISE]) * size)
        header = (b"BM", self.size, 0, _HEADER.size, 40, self.pixels, self.pixels, 1, 24, 0, size)
        pixels = (noise + int.from_bytes(pattern)).to_bytes(size)
        yield (_HEADER.pack(*header, 2835, 2835, 0, 0) + pixels)[offset:]

    def _random(self, key: str, size: int) -> bytes:
        return hashlib.shake_128(f"{_VERSION}/{self.seed}/{key}".encode()).digest(size)
