"""Size and orientation of an image file, from its headers, before pixels are decoded."""

import struct
from typing import NamedTuple

_JPEG = b"\xff\xd8\xff"
_EXIF = 0xE1
_ORIENTATION = 0x0112
_PNG = b"\x89PNG\r\n\x1a\n"
_JPEG_SIZE = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_BASELINE = frozenset({0xC0, 0xC1})
_JPEG_ALONE = frozenset({0x01, *range(0xD0, 0xD9)})
_JPEG_END = frozenset({0xD9, 0xDA})


def pixels_of(data: bytes) -> int:
    """Return the pixels of all frames of a JPEG, PNG, WebP or GIF that its decoder allocates.

    Raises:
        ValueError: another format, or invalid headers.
    """
    try:
        if data[:3] == _JPEG:
            return _jpeg(data)
        if data[:8] == _PNG:
            width, height = struct.unpack_from(">II", data, 16)
            return int(width * height)
        if data[:6] in (b"GIF87a", b"GIF89a"):
            return _gif(data)
        if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
            return _webp(data)
    except (IndexError, struct.error):
        raise ValueError("its header is truncated") from None
    raise ValueError("not a JPEG, PNG, WebP or GIF")


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


def _jpeg(data: bytes) -> int:
    frame = _frame(data)
    return frame.height * frame.width


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
            if marker == _EXIF and orientation is None:
                orientation = _orientation(data[at + 8 : at + length])
            at += length


def _orientation(tiff: bytes) -> int:
    """Return the orientation in EXIF data, as torchcodec reads it; 1 without one."""
    order = "<" if tiff[:2] == b"II" else ">"
    try:
        mark, at = struct.unpack_from(f"{order}HI", tiff, 2)
        entries = struct.unpack_from(f"{order}H", tiff, at)[0] if mark == 42 else 0
        for entry in range(at + 2, at + 2 + 12 * entries, 12):
            if struct.unpack_from(f"{order}H", tiff, entry)[0] == _ORIENTATION:
                return int(struct.unpack_from(f"{order}H", tiff, entry + 8)[0])
    except struct.error:
        pass
    return 1


def _gif(data: bytes) -> int:
    """Count for each frame the pixels of the screen, or its own if larger."""
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    screen, total, at = width * height, 0, 13 + _gif_colours(flags)
    while at < len(data) and data[at] in b"!,":
        if data[at] == ord("!"):
            at += 2
        else:
            width, height, flags = struct.unpack_from("<HHB", data, at + 5)
            total += max(screen, width * height)
            at += 11 + _gif_colours(flags)
        while length := data[at]:
            at += 1 + length
        at += 1
    return int(total or screen)


def _gif_colours(flags: int) -> int:
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _webp(data: bytes) -> int:
    """Count for each frame the pixels of the canvas, or of the image if larger."""
    largest, at = 0, 12
    while at + 8 <= len(data):
        kind, length = struct.unpack_from("<4sI", data, at)
        at += 8
        width = height = 0
        if kind == b"VP8X":
            width = 1 + int.from_bytes(data[at + 4 : at + 7], "little")
            height = 1 + int.from_bytes(data[at + 7 : at + 10], "little")
        elif kind == b"VP8L":
            (bits,) = struct.unpack_from("<I", data, at + 1)
            width, height = 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
        elif kind == b"VP8 ":
            width, height = (side & 0x3FFF for side in struct.unpack_from("<HH", data, at + 6))
        largest = max(largest, width * height)
        at += length + length % 2
    if not largest:
        raise ValueError("its header is truncated")
    # The decoder also finds frames after a wrong length: count everything that looks like one.
    return largest * max(1, data.count(b"ANMF"))
