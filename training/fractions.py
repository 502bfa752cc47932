"""A JPEG decoded at a fraction of its sides, which takes less time and memory than all of it.

libjpeg leaves out the high frequencies of each block of 8x8 pixels. torchcodec offers no way to
that; Pillow does, which torchvision brings along.
"""

import io
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kfp_ddp.training.header import Frame, frame_of

Divisor = Callable[[int, int], int]
"""By how much the sides of an image of a height and a width may be divided; 1, 2, 4 or 8."""

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
    """An image, and the sides that all of it has."""

    image: Tensor
    """uint8 [C, H, W], turned as its EXIF data say."""
    height: int
    width: int


def decoded(data: bytes, divisor: Divisor) -> Decoded | None:
    """The RGB image with its sides divided, rounded up, as `divisor` allows.

    None where they are not to be divided, or cannot be: another format or number of channels, or
    damage, of which the decoder of all of it tells.
    """
    frame = frame_of(data)
    if frame is None or frame.components != 3:
        return None
    swapped, mirrored = _TURNS.get(frame.orientation, (False, []))
    height, width = frame.height, frame.width
    if swapped:
        height, width = width, height
    by = divisor(height, width)
    while mirrored and (height % by or width % by):  # the pixel at the end, not whole, comes first
        by //= 2
    image = _drafted(data, frame, by) if by > 1 else None
    if image is None:
        return None
    if swapped:
        image = image.transpose(-1, -2)
    return Decoded(image.flip(mirrored) if mirrored else image, height, width)


def _drafted(data: bytes, frame: Frame, by: int) -> Tensor | None:
    import numpy as np
    from PIL import JpegImagePlugin

    try:
        picture = JpegImagePlugin.JpegImageFile(io.BytesIO(data))
        picture.draft("RGB", (frame.width // by, frame.height // by))
        if (picture.mode, picture.size) != ("RGB", (-(-frame.width // by), -(-frame.height // by))):
            return None
        return torch.from_numpy(np.array(picture)).permute(2, 0, 1)
    except Exception:  # noqa: BLE001  Pillow raises many kinds for damage
        return None
