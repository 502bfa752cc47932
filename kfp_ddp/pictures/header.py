"""Size and orientation of an image file, from its headers, before pixels are decoded."""

import struct
from collections.abc import Iterator
from typing import NamedTuple

_JPEG = b"\xff\xd8\xff"
_EXIF = 0xE1
_EXIF_MARK = b"Exif\0\0"
ORIENTATION = 0x0112
_TIFF_MARK = 42
_TIFF_ENTRY = 12
"""Bytes of an entry in a directory of TIFF."""
_PNG = b"\x89PNG\r\n\x1a\n"
_PNG_RGB = b"\x08\x02\0\0"
"""8 bits, RGB, and the only compression and filter."""
_PNG_EXTRAS = frozenset({b"tRNS", b"eXIf", b"acTL"})
_JPEG_SIZE = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_BASELINE = frozenset({0xC0, 0xC1})
_JPEG_ALONE = frozenset({0x01, *range(0xD0, 0xD9)})
_JPEG_END = frozenset({0xD9, 0xDA})
_JPEG_SIZES = {0xE0: (16,), 0xDB: (67, 132), **dict.fromkeys((0xC0, 0xC1, 0xC2), (17,))}
_JPEG_ANY_SIZE = frozenset({0xC4, 0xDD, 0xFE})
_JPEG_EXTRAS = frozenset({0xE1, 0xE2, 0xFE})
_JPEG_PIXELS = b"\xff\xda"


def plain_pixels(data: bytes) -> int:
    """Return the pixels of a complete PNG or WebP, RGB, opaque, upright, not animated; else 0."""
    if data[:8] == _PNG and data[24:28] == _PNG_RGB:
        return _png_pixels(data)
    if data[:4] == b"RIFF" and data[8:16] == b"WEBPVP8 ":
        return _webp_pixels(data)
    return 0


def _png_pixels(data: bytes) -> int:
    chunks = list(_chunks(data))
    if b"IDAT" not in chunks or not _PNG_EXTRAS.isdisjoint(chunks):
        return 0
    pixels = chunks.index(b"IDAT")
    after = [kind for kind in chunks[pixels:] if kind != b"IDAT"]
    if after != [b"IEND", b""]:
        return 0
    width, height = struct.unpack_from(">II", data, 16)
    return int(width * height)


def _webp_pixels(data: bytes) -> int:
    if len(data) <= 30:
        return 0
    size = struct.unpack_from("<I", data, 4)[0]
    pixels = struct.unpack_from("<I", data, 16)[0]
    if not len(data) == size + 8 == pixels + pixels % 2 + 20:
        return 0
    width, height = struct.unpack_from("<HH", data, 26)
    return int((width & 0x3FFF) * (height & 0x3FFF))


def _chunks(data: bytes) -> Iterator[bytes]:
    """Yield the kinds of the chunks of a PNG, and `b""` if its last one ends with the file."""
    offset = len(_PNG)
    while offset + 12 <= len(data):
        size, kind = struct.unpack_from(">I4s", data, offset)
        yield kind
        offset += 12 + size
    if offset == len(data):
        yield b""


def is_usual(data: bytes) -> bool:
    """Return whether the header of a JPEG has only segments that no library refuses."""
    end = 2
    for marker, start, end in _segments(data):
        if marker in _JPEG_ANY_SIZE:
            continue
        size = end - start - 2
        if size not in _JPEG_SIZES.get(marker, ()):
            return False
    return data[end : end + 2] == _JPEG_PIXELS


def without_extras(data: bytes) -> bytes:
    """Return a JPEG without EXIF, colour profiles and comments, which change no pixel here."""
    parts = [data[:2]]
    end = 2
    for marker, start, end in _segments(data):
        if marker not in _JPEG_EXTRAS:
            parts.append(data[start:end])
    return b"".join([*parts, data[end:]])


def _segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield the marker, start and end of each segment before the pixels of a JPEG."""
    start = 2
    while start + 4 <= len(data) and data[start] == 0xFF:
        if data[start : start + 2] == _JPEG_PIXELS:
            return
        length = struct.unpack_from(">H", data, start + 2)[0]
        end = start + 2 + length
        yield data[start + 1], start, end
        start = end


class Frame(NamedTuple):
    """Frame header and EXIF orientation of a JPEG."""

    height: int
    width: int
    components: int
    orientation: int
    """1 to 8 as in EXIF (JEITA CP-3451C, 4.6.4.A); other values do not rotate."""
    baseline: bool
    """Whether it is sequential with Huffman coding."""
    at: int
    """Offset of its height, two bytes."""


def frame_of(data: bytes) -> Frame | None:
    """Return the frame header of a JPEG; None for another format or damaged headers."""
    try:
        if data[:3] == _JPEG:
            return _frame(data)
    except (IndexError, struct.error, ValueError):
        pass
    return None


def _frame(data: bytes) -> Frame:
    """Search markers as libjpeg does, which skips other bytes."""
    at = 2
    orientation: int | None = None
    while True:
        at = data.index(0xFF, at)
        while data[at] == 0xFF:
            at += 1
        marker = data[at]
        at += 1
        if marker in _JPEG_SIZE:
            place = at + 3
            height, width, components = struct.unpack_from(">HHB", data, place)
            baseline = marker in _BASELINE
            return Frame(height, width, components, orientation or 1, baseline, place)
        if marker in _JPEG_END:
            raise ValueError("no size before its pixels")
        if not marker or marker in _JPEG_ALONE:
            continue
        length = struct.unpack_from(">H", data, at)[0]
        # Of several, the first EXIF counts.
        if marker == _EXIF and orientation is None:
            orientation = _orientation_in(data[at + 2 : at + length])
        at += length


def _orientation_in(segment: bytes) -> int | None:
    """Return the orientation in a segment of a JPEG; None if it is not EXIF."""
    if not segment.startswith(_EXIF_MARK):
        return None
    return orientation_of(segment[len(_EXIF_MARK) :])


def orientation_of(tiff: bytes) -> int:
    """Return the orientation in EXIF data; 1 without one."""
    order = "<" if tiff[:2] == b"II" else ">"
    try:
        mark, directory = struct.unpack_from(f"{order}HI", tiff, 2)
        if mark != _TIFF_MARK:
            return 1
        count = struct.unpack_from(f"{order}H", tiff, directory)[0]
        first = directory + 2
        for entry in range(first, first + _TIFF_ENTRY * count, _TIFF_ENTRY):
            tag = struct.unpack_from(f"{order}H", tiff, entry)[0]
            if tag == ORIENTATION:
                return int(struct.unpack_from(f"{order}H", tiff, entry + 8)[0])
    except struct.error:
        pass
    return 1
