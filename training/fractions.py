"""A JPEG decoded as far as training needs it, which takes less time and memory than all of it.

At a fraction of its sides libjpeg leaves out the high frequencies of each block of 8x8 pixels, and
below the last row of a crop it need not decode at all. torchcodec offers no way to either.
"""

import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kfp_ddp.training.header import Frame, frame_of


class Need(NamedTuple):
    """How much of an image is needed."""

    divisor: int
    """By how much its sides may be divided; 1, 2, 4 or 8."""
    rows: int
    """Rows from its top, of all of the image."""
    drawn: Any = None
    """What chance made of it, handed on with the image."""


Needed = Callable[[int, int], Need]
"""What is needed of an image of a height and a width."""

_END = b"\xff\xd9"
_BELOW = 2
"""Rows below the last that its colours are made of, where they are stored at half the height."""
_TURNS: dict[int, tuple[bool, list[int]]] = {
    2: (False, [-1]),
    3: (False, [-2, -1]),
    4: (False, [-2]),
    5: (True, []),
    6: (True, [-1]),
    7: (True, [-2, -1]),
    8: (True, [-2]),
}
"""Of an EXIF orientation: whether rows become columns, and which sides are mirrored then."""


class Decoded(NamedTuple):
    """An image, or as much of it as is needed, and the sides that all of it has."""

    image: Tensor
    """uint8 [C, H, W], turned as its EXIF data say."""
    height: int
    width: int
    divisor: int = 1
    drawn: Any = None
    """As in `Need`."""


def decoded(data: bytes, needed: Needed) -> Decoded | None:
    """The RGB image with its sides divided, rounded up, or without rows that are not needed.

    None where it cannot be had: another format or number of channels, or damage, of which the
    decoder of all of it tells.
    """
    frame = frame_of(data)
    if frame is None or frame.components != 3:
        return None
    swapped, mirrored = _TURNS.get(frame.orientation, (False, []))
    height, width = frame.height, frame.width
    if swapped:
        height, width = width, height
    by, rows, drawn = needed(height, width)
    while mirrored and (height % by or width % by):  # the pixel at the end, not whole, comes first
        by //= 2
    image = None
    if by == 1 and not swapped and not mirrored:
        image = _above(data, frame, rows + _BELOW)
    if image is None:
        image = _divided(data, frame, by)
    if image is None:
        return None
    if swapped:
        image = image.transpose(-1, -2)
    return Decoded(image.flip(mirrored) if mirrored else image, height, width, by, drawn)


def _above(data: bytes, frame: Frame, rows: int) -> Tensor | None:
    """So many rows from the top; None where there are no more, or they cannot be had alone.

    The decoder is told a smaller height. One that is cut off has to be named, so it is decoded
    whole; of what follows the last row the decoder would complain.
    """
    if rows >= frame.height or not frame.baseline or not data.endswith(_END):
        return None
    shortened = bytearray(data)
    struct.pack_into(">H", shortened, frame.at, rows)
    return _sized(bytes(shortened), rows, frame.width, strict=False)


def _divided(data: bytes, frame: Frame, by: int) -> Tensor | None:
    return _sized(data, -(-frame.height // by), -(-frame.width // by), strict=True)


def _sized(data: bytes, height: int, width: int, *, strict: bool) -> Tensor | None:
    """The RGB image uint8 [3, H, W] in the least of its sizes that is no smaller, if that fits."""
    import simplejpeg

    try:
        pixels = simplejpeg.decode_jpeg(
            data,
            fastdct=False,
            fastupsample=False,
            min_height=height,
            min_width=width,
            strict=strict,
        )
    except ValueError:
        return None
    if pixels.shape != (height, width, 3):
        return None
    return torch.from_numpy(pixels).permute(2, 0, 1)
