"""From a picture's file to the square that a network sees, to the bit as in training."""

import math
import warnings
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kfp_ddp.base.errors import InputError
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
    pixels = _resized(_resized(pixels.swapaxes(0, 1), width).swapaxes(0, 1), height)
    top, left = (height - size) // 2, (width - size) // 2
    return pixels[top : top + size, left : left + size].transpose(2, 0, 1)


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


def _resized(pixels: Bytes, size: int) -> Bytes:
    """Resize the first side, bilinear with antialiasing, in the integers of torch's kernel."""
    length = pixels.shape[0]
    if length == size:
        return pixels
    scale = length / size
    reach = max(scale, 1.0)
    centre = scale * (np.arange(size) + 0.5)
    first = np.maximum((centre - reach + 0.5).astype(np.int64), 0)
    last = np.minimum((centre + reach + 0.5).astype(np.int64), length)
    taps = first[:, None] + np.arange(math.ceil(reach) * 2 + 1)
    weights = np.maximum(1 - abs((taps - centre[:, None] + 0.5) / reach), 0)
    weights *= taps < last[:, None]
    weights /= weights.sum(1, keepdims=True)
    # As many bits as a weight has room for in 16, its sign included.
    bits = next(b for b in range(23) if b == 22 or int(0.5 + weights.max() * (2 << b)) >= 1 << 15)
    fixed = (weights * (1 << bits) + 0.5).astype(np.int32)
    total = np.full((size, *pixels.shape[1:]), 1 << (bits - 1), np.int32)
    for column, tap in zip(fixed.T, np.minimum(taps, length - 1).T, strict=True):
        total += column[:, None, None] * pixels[tap]
    return (total >> bits).clip(0, 255).astype(np.uint8)
