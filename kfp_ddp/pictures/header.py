"""Size and orientation of an image file, from its headers, before pixels are decoded."""

import struct
from collections.abc import Iterator
from typing import NamedTuple

_JPEG = b"\xff\xd8\xff"
_EXIF = 0xE1
_EXIF_MARK = b"Exif\0\0"
ORIENTATION = 0x0112
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
        width, height = struct.unpack_from(">II", data, 16)
        chunks = list(_chunks(data))
        after = chunks[chunks.index(b"IDAT") :] if b"IDAT" in chunks else chunks
        ends = [kind for kind in after if kind != b"IDAT"] == [b"IEND", b""]
        return int(width * height) if ends and not _PNG_EXTRAS.intersection(chunks) else 0
    if data[:4] == b"RIFF" and data[8:16] == b"WEBPVP8 " and len(data) > 30:
        width, height = (side & 0x3FFF for side in struct.unpack_from("<HH", data, 26))
        size, pixels = (struct.unpack_from("<I", data, at)[0] for at in (4, 16))
        complete = len(data) == size + 8 == pixels + pixels % 2 + 20
        return int(width * height) if complete else 0
    return 0


def _chunks(data: bytes) -> Iterator[bytes]:
    """Yield the kinds of the chunks of a PNG, and `b""` if its last one ends with the file."""
    at = len(_PNG)
    while at + 12 <= len(data):
        size, kind = struct.unpack_from(">I4s", data, at)
        yield kind
        at += 12 + size
    if at == len(data):
        yield b""


def is_usual(data: bytes) -> bool:
    """Return whether the header of a JPEG has only segments that no library refuses."""
    end = 2
    for marker, start, end in _segments(data):
        size = end - start - 2
        if marker not in _JPEG_ANY_SIZE and size not in _JPEG_SIZES.get(marker, ()):
            return False
    return data[end : end + 2] == _JPEG_PIXELS


def without_extras(data: bytes) -> bytes:
    """Return a JPEG without EXIF, colour profiles and comments, which change no pixel here."""
    parts, end = [data[:2]], 2
    for marker, start, end in _segments(data):
        if marker not in _JPEG_EXTRAS:
            parts.append(data[start:end])
    return b"".join([*parts, data[end:]])


def _segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield the marker, start and end of each segment before the pixels of a JPEG."""
    at = 2
    while at + 4 <= len(data) and data[at] == 0xFF and data[at : at + 2] != _JPEG_PIXELS:
        end = at + 2 + struct.unpack_from(">H", data, at + 2)[0]
        yield data[at + 1], at, end
        at = end


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
        return _frame(data) if data[:3] == _JPEG else None
    except (IndexError, struct.error, ValueError):
        return None


def _frame(data: bytes) -> Frame:
    """Search markers as libjpeg does, which skips other bytes."""
    at = 2
    orientation: int | None = None
    while True:
        while data[at] != 0xFF:
            at += 1
        while data[at] == 0xFF:
            at += 1
        marker = data[at]
        at += 1
        if marker in _JPEG_SIZE:
            height, width, components = struct.unpack_from(">HHB", data, at + 3)
            return Frame(height, width, components, orientation or 1, marker in _BASELINE, at + 3)
        if marker in _JPEG_END:
            raise ValueError("no size before its pixels")
        if marker and marker not in _JPEG_ALONE:
            length = struct.unpack_from(">H", data, at)[0]
            if marker == _EXIF and orientation is None and data[at + 2 : at + 8] == _EXIF_MARK:
                orientation = orientation_of(data[at + 8 : at + length])
            at += length


def orientation_of(tiff: bytes) -> int:
    """Return the orientation in EXIF data; 1 without one."""
    order = "<" if tiff[:2] == b"II" else ">"
    try:
        mark, at = struct.unpack_from(f"{order}HI", tiff, 2)
        entries = struct.unpack_from(f"{order}H", tiff, at)[0] if mark == 42 else 0
        for entry in range(at + 2, at + 2 + 12 * entries, 12):
            if struct.unpack_from(f"{order}H", tiff, entry)[0] == ORIENTATION:
                return int(struct.unpack_from(f"{order}H", tiff, entry + 8)[0])
    except struct.error:
        pass
    return 1
