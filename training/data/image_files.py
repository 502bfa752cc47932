"""Image files: decoding, the part of a JPEG that training needs, and broken or unusual images."""

import io
import math
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from kfp_ddp.core.errors import InputError
from kfp_ddp.pictures import decoder
from kfp_ddp.pictures.header import Frame, frame_of, is_usual, plain_pixels
from kfp_ddp.pictures.reading import READING, Reading
from kfp_ddp.pictures.shards import Where, content
from kfp_ddp.training.spec.config import TrainConfig


class Need(NamedTuple):
    """The part of an image that training needs."""

    divisor: int
    """Largest divisor of its sides: 1, 2, 4 or 8."""
    rows: int
    """Rows from the top, at full size."""


Needed = Callable[[int, int], Need]
"""Returns the need for an image of a height and a width."""

END = b"\xff\xd9"
_BELOW = 2
"""Rows below the last one that its colours depend on, if stored at half the height."""
_MIRRORED = {2: [-1], 3: [-2, -1], 4: [-2], 6: [-1], 7: [-2, -1], 8: [-2]}
"""Mirrored axes by EXIF orientation, after rows became columns from 5 on."""


class Decoded(NamedTuple):
    """An image or the needed part of it, and the full height and width."""

    image: Tensor
    """uint8 [C, H, W], rotated by its EXIF orientation."""
    height: int
    width: int
    divisor: int = 1
    plain: bool = True
    """Whether the file is RGB of 8 bits."""


def decode_part(data: bytes, needed: Needed) -> Decoded | None:
    """Decode the needed part of an RGB JPEG; None for another file, or damage.

    At a fraction of its size libjpeg skips high frequencies; torchcodec does not offer it.
    """
    frame = frame_of(data)
    if frame is None or frame.components != 3:
        return None
    swapped = 5 <= frame.orientation <= 8
    mirrored = _MIRRORED.get(frame.orientation, [])
    height = frame.width if swapped else frame.height
    width = frame.height if swapped else frame.width
    by, rows = needed(height, width)
    while mirrored and math.gcd(height, width) % by:  # the last pixel would be incomplete
        by //= 2
    image = None
    if by == 1 and not 2 <= frame.orientation <= 8:
        image = _above(data, frame, rows + _BELOW)
    if image is None:
        image = _sized(data, -(-frame.height // by), -(-frame.width // by), strict=True)
    if image is None:
        return None
    return Decoded(upright(image, frame.orientation), height, width, by)


def upright(image: Tensor, orientation: int) -> Tensor:
    """Rotate an image [..., H, W] by its EXIF orientation."""
    mirrored = _MIRRORED.get(orientation, [])
    image = image.transpose(-1, -2) if 5 <= orientation <= 8 else image
    return image.flip(mirrored) if mirrored else image


def _above(data: bytes, frame: Frame, rows: int) -> Tensor | None:
    """Decode rows from the top by a smaller height in the header; None if it is not possible."""
    if rows >= frame.height or not frame.baseline:
        return None
    if not data.endswith(END):
        return None
    shortened = bytearray(data)
    struct.pack_into(">H", shortened, frame.at, rows)
    return _sized(bytes(shortened), rows, frame.width, strict=False)


def _sized(data: bytes, height: int, width: int, *, strict: bool) -> Tensor | None:
    """Decode to uint8 [3, H, W] in the smallest size of libjpeg that is large enough, if exact."""
    import simplejpeg

    try:
        slow = {"fastdct": False, "fastupsample": False, "strict": strict}
        pixels = simplejpeg.decode_jpeg(data, min_height=height, min_width=width, **slow)
    except ValueError:
        return None
    if pixels.shape != (height, width, 3):
        return None
    return torch.from_numpy(pixels).permute(2, 0, 1)


def read(path: str | Where, reading: Reading = READING) -> Tensor:
    """Decode an image to RGB uint8 [3, H, W], rotated by its EXIF orientation; raise InputError."""
    return read_part(path, reading).image


def read_part(
    path: str | Where,
    reading: Reading,
    needed: Needed = lambda height, width: Need(1, max(height, width)),
) -> Decoded:
    """Decode like `read`, of a JPEG only the needed part."""
    try:
        decoded = _decode(path, reading, needed)
    except (ValueError, OSError) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(
            f"cannot decode {path} ({why}): replace or remove it in the source, or leave out such "
            "images with --set on_bad_image=skip"
        ) from None
    if reading.images == "strict":
        _check_plain_square(path, decoded)
    return decoded


def _check_plain_square(path: str | Where, decoded: Decoded) -> None:
    """Raise InputError for what images=strict refuses."""
    if not decoded.plain:
        raise InputError(f"{path} is not RGB of 8 bits: convert it, or set images=convert")
    if decoded.height != decoded.width:
        size = f"{decoded.width}x{decoded.height}"
        raise InputError(f"{path} is {size}, not square: crop it, or set images=convert")


def _decode(path: str | Where, reading: Reading, needed: Needed) -> Decoded:
    """Decode as `decoder.decode` does, by a faster library where that gives the same pixels."""
    where = Where(path) if isinstance(path, str) else path
    data = content(where, reading.most_bytes)
    frame = frame_of(data)
    pixels = frame.height * frame.width if frame else plain_pixels(data)
    if 0 < pixels <= reading.max_pixels:
        if not is_usual(data):
            decoder.open_picture(io.BytesIO(data), reading)
        fast = decode_part(data, needed) if frame else _plain(data)
        if fast is not None:
            return fast
    array, plain = decoder.decode(data, reading)
    height, width, _ = array.shape
    return Decoded(torch.from_numpy(array).permute(2, 0, 1), height, width, plain=plain)


def _plain(data: bytes) -> Decoded | None:
    """Decode a file of `plain_pixels` in three quarters of the time of Pillow; None for damage."""
    from torchcodec.decoders import decode_image  # type: ignore[attr-defined]

    # A tensor: from bytes, torchcodec changes the warning filters each time.
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    try:
        image: Tensor = decode_image(tensor, mode="RGB")
    except RuntimeError:
        return None
    return Decoded(image, *image.shape[-2:])


class Findings(NamedTuple):
    """Result of `examine`."""

    checked: int
    broken: tuple[str, ...]
    """Names of the unreadable images in the dataset."""
    not_rgb: int
    first_not_rgb: str


def examine(
    where: Callable[[int], Where],
    positions: Sequence[int],
    config: TrainConfig,
    keep: Callable[[int, Tensor | None], None] | None = None,
) -> Findings:
    """Decode images completely, and pass each, or None, to `keep`; raise InputError."""
    broken: list[str] = []
    not_rgb = 0
    first = ""
    for position in positions:
        decoded = None
        try:
            decoded = read_part(where(position), config.reading)
        except InputError:
            if config.on_bad_image == "fail":
                raise
            broken.append(str(where(position)).removeprefix(f"{Path(config.data)}/"))
        if decoded and not decoded.plain:
            not_rgb += 1
            first = first or str(where(position))
        if keep:
            keep(position, decoded.image if decoded else None)
    return Findings(len(positions), tuple(broken), not_rgb, first)
