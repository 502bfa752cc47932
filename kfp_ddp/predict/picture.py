"""From a picture's file to the square that a network sees, to the bit as in training."""

import math
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kfp_ddp.core.errors import InputError
from kfp_ddp.training.config import MAX_PIXELS

Bytes = NDArray[np.uint8]


def square(path: Path, short_side: int, size: int) -> Bytes:
    """The centre of a picture: uint8 [3, size, size], RGB.

    Args:
        path: Of the picture.
        short_side: Pixels that the shorter side is resized to.
        size: Pixels of the square that is cut out.

    Raises:
        InputError: it cannot be read.
    """
    pixels = _decoded(path)
    scale = short_side / min(pixels.shape[:2])
    height, width = (max(short_side, round(side * scale)) for side in pixels.shape[:2])
    # Of a line of pixels, grown, there is far more than the square: no more is read or made.
    down, across = (
        _middle(length, full, size)
        for length, full in zip(pixels.shape[:2], (height, width), strict=True)
    )
    pixels = pixels[down.used, across.used]
    return _resized(_resized(pixels.swapaxes(0, 1), across).swapaxes(0, 1), down).transpose(2, 0, 1)


def _decoded(path: Path) -> Bytes:
    """The picture in RGB, uint8 [H, W, 3], turned as its EXIF data say."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with warnings.catch_warnings(), path.open("rb") as file:
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image: Image.Image = Image.open(file)
            if math.prod(image.size) > MAX_PIXELS:
                raise ValueError(f"it has more than {MAX_PIXELS:,} pixels")
            if getattr(image, "is_animated", False):
                raise ValueError("it is an animation")
            image = ImageOps.exif_transpose(image)
            if image.mode.startswith("I"):  # 16 bits, which Pillow cuts off at 255: as libpng does
                deep = np.asarray(image).astype(np.int64)
                image = Image.fromarray(((deep * 255 + 32895) >> 16).astype(np.uint8))
            return np.asarray(image.convert("RGB"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        why = "it is no picture" if isinstance(error, UnidentifiedImageError) else str(error)
        why = getattr(error, "strerror", None) or why
        raise InputError(
            f"cannot read {path} ({why.splitlines()[0]}): give a picture, such as a JPEG or a PNG"
        ) from None


class _Middle(NamedTuple):
    """How the rows in the middle of a side that is resized are made."""

    used: slice
    """The pixels of the side that they are made of."""
    taps: NDArray[np.int64]
    """Numbers of these: [rows, taps]."""
    weights: NDArray[np.int32]
    """As whole numbers of 2^-bits."""
    bits: int


def _middle(length: int, size: int, kept: int) -> _Middle:
    """Bilinear with antialiasing, in the integers of torch's kernel.

    Args:
        length: Pixels of the side.
        size: Pixels that it is resized to.
        kept: So many of them, in the middle, are made.
    """
    # All of them share the bits of the largest weight, which is 1 at the edge of what grows.
    largest = 1.0 if length <= size else _taps(length, size, 0, size)[1].max()
    # As many bits as a weight has room for in 16, its sign included.
    bits = next(b for b in range(23) if b == 22 or int(0.5 + largest * (2 << b)) >= 1 << 15)
    taps, weights = _taps(length, size, (size - kept) // 2, kept)
    taps = np.minimum(taps, length - 1)
    first, last = int(taps.min()), int(taps.max())
    fixed = (weights * (1 << bits) + 0.5).astype(np.int32)
    return _Middle(slice(first, last + 1), taps - first, fixed, bits)


def _resized(pixels: Bytes, how: _Middle) -> Bytes:
    """Resize the first side."""
    total = np.full((len(how.taps), *pixels.shape[1:]), 1 << (how.bits - 1), np.int32)
    for column, tap in zip(how.weights.T, how.taps.T, strict=True):
        total += column[:, None, None] * pixels[tap]
    return (total >> how.bits).clip(0, 255).astype(np.uint8)


def _taps(
    length: int, size: int, top: int, kept: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The pixels that `kept` rows from `top` on are made of, and their weights: [kept, taps]."""
    scale = length / size
    reach = max(scale, 1.0)
    centre = scale * (np.arange(top, top + kept) + 0.5)
    first = np.maximum((centre - reach + 0.5).astype(np.int64), 0)
    last = np.minimum((centre + reach + 0.5).astype(np.int64), length)
    taps = first[:, None] + np.arange(math.ceil(reach) * 2 + 1)
    weights = np.maximum(1 - abs((taps - centre[:, None] + 0.5) / reach), 0)
    weights *= taps < last[:, None]
    return taps, weights / weights.sum(1, keepdims=True)
