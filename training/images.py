"""Image files: decoding, the part of a JPEG that training needs, and broken or unusual images."""

import struct
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from kfp_ddp.core.errors import InputError
from kfp_ddp.training.config import MAX_PIXELS, TrainConfig
from kfp_ddp.training.header import Frame, frame_of, pixels_of
from kfp_ddp.training.shards import Where, content


class Need(NamedTuple):
    """The part of an image that training needs."""

    divisor: int
    """Largest divisor of its sides: 1, 2, 4 or 8."""
    rows: int
    """Rows from the top, at full size."""
    drawn: Any = None
    """Random values of the transform, passed on with the image."""


Needed = Callable[[int, int], Need]
"""Returns the need for an image of a height and a width."""

_END = b"\xff\xd9"
_BELOW = 2
"""Rows below the last one that its colours depend on, if stored at half the height."""
_TURNS: dict[int, tuple[bool, list[int]]] = {
    2: (False, [-1]),
    3: (False, [-2, -1]),
    4: (False, [-2]),
    5: (True, []),
    6: (True, [-1]),
    7: (True, [-2, -1]),
    8: (True, [-2]),
}
"""By EXIF orientation: whether rows become columns, and the axes that are then mirrored."""


class Decoded(NamedTuple):
    """An image or the needed part of it, and the full height and width."""

    image: Tensor
    """uint8 [C, H, W], rotated by its EXIF orientation."""
    height: int
    width: int
    divisor: int = 1
    drawn: Any = None
    """As in `Need`."""


def decode_part(data: bytes, needed: Needed) -> Decoded | None:
    """Decode the needed part of an RGB JPEG: its sides divided, rounded up, or fewer rows.

    At a fraction of its size libjpeg skips the high frequencies of each 8x8 block, and rows below a
    crop need not be decoded; torchcodec offers neither. Returns None for another format or number
    of channels, or damage, which the full decoder reports.
    """
    frame = frame_of(data)
    if frame is None or frame.components != 3:
        return None
    swapped, mirrored = _TURNS.get(frame.orientation, (False, []))
    height, width = frame.height, frame.width
    if swapped:
        height, width = width, height
    by, rows, drawn = needed(height, width)
    while mirrored and (height % by or width % by):  # the last pixel would be incomplete
        by //= 2
    image = None
    if by == 1 and not swapped and not mirrored:
        image = _above(data, frame, rows + _BELOW)
    if image is None:
        image = _sized(data, -(-frame.height // by), -(-frame.width // by), strict=True)
    if image is None:
        return None
    if swapped:
        image = image.transpose(-1, -2)
    return Decoded(image.flip(mirrored) if mirrored else image, height, width, by, drawn)


def _above(data: bytes, frame: Frame, rows: int) -> Tensor | None:
    """Decode rows from the top; None if all are needed, or they cannot be decoded alone.

    The header gets a smaller height, and `strict=False` ignores the data after the last row. A
    truncated file is decoded completely instead, so that it is reported.
    """
    if rows >= frame.height or not frame.baseline or not data.endswith(_END):
        return None
    shortened = bytearray(data)
    struct.pack_into(">H", shortened, frame.at, rows)
    return _sized(bytes(shortened), rows, frame.width, strict=False)


def _sized(data: bytes, height: int, width: int, *, strict: bool) -> Tensor | None:
    """Decode to uint8 [3, H, W] in the smallest size of libjpeg that is large enough, if exact."""
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


Keep = Callable[[int, Tensor | None], None]
Mode = Literal["RGB", "UNCHANGED"]

_MOST_BYTES_A_PIXEL = 8
_MOST_EXTRA = 2**26
"""Bytes of a file that are not pixels: profiles, thumbnails."""


def read(path: str | Where, strict: bool = False, max_pixels: int = MAX_PIXELS) -> Tensor:
    """Decode one image to RGB uint8 [3, H, W], rotated by its EXIF orientation.

    Raises:
        InputError: the file cannot be read or decoded, or has more than `max_pixels`; or, with
            `strict`, is not RGB and square.
    """
    image = _read(path, "UNCHANGED" if strict else "RGB", max_pixels).image
    if strict:
        _refuse_unusual(path, image)
    return image


def read_part(path: str | Where, max_pixels: int, needed: Needed) -> Decoded:
    """Decode like `read`, but of a JPEG of three channels only the needed part.

    Raises:
        InputError: as in `read`.
    """
    return _read(path, "RGB", max_pixels, needed)


def _read(path: str | Where, mode: Mode, max_pixels: int, needed: Needed | None = None) -> Decoded:
    try:
        decoded = _decode(path, mode, max_pixels, needed)
    except (RuntimeError, ValueError, OSError) as error:
        why = str(error).splitlines()[0].rpartition(", ")[2]
        raise InputError(
            f"cannot decode {path} ({why}): replace or remove it in the source, or set "
            "on_bad_image=skip"
        ) from None
    if decoded.image.ndim != 3:
        raise InputError(f"{path} is an animation: replace it by a single image")
    return decoded


def _decode(
    path: str | Where, mode: Mode, max_pixels: int, needed: Needed | None = None
) -> Decoded:
    from torchcodec.decoders import decode_image  # type: ignore[attr-defined]

    where = Where(path) if isinstance(path, str) else path
    data = content(where, _MOST_BYTES_A_PIXEL * max_pixels + _MOST_EXTRA)
    pixels = pixels_of(data)
    if pixels > max_pixels:
        raise ValueError(f"its {pixels} pixels are more than max_pixels={max_pixels}")
    if needed and (part := decode_part(data, needed)):
        return part
    # A separate tensor: from bytes, torchcodec changes the warning filters each time.
    image: Tensor = decode_image(torch.frombuffer(bytearray(data), dtype=torch.uint8), mode=mode)
    return Decoded(image, *image.shape[-2:])


def _refuse_unusual(path: str | Where, image: Tensor) -> None:
    channels, height, width = image.shape
    if channels != 3:
        raise InputError(
            f"{path} is not RGB but has {channels} channels: convert it, or set images=convert"
        )
    if height != width:
        raise InputError(f"{path} is {width}x{height}, not square: crop it, or set images=convert")


class Findings(NamedTuple):
    """Result of `examine`."""

    checked: int
    broken: int
    not_rgb: int
    first_not_rgb: str


def examine(
    where: Callable[[int], Where],
    positions: Sequence[int],
    config: TrainConfig,
    keep: Keep | None = None,
) -> Findings:
    """Decode the images at `positions` completely, and pass each, in RGB, to `keep`.

    `where` returns the location of an image; `keep` gets None for an unreadable image.

    Raises:
        InputError: an image is broken and `on_bad_image` is fail, or unusual and `images` is
            strict.
    """
    broken = not_rgb = 0
    first = ""
    for position in positions:
        path = where(position)
        try:
            image = _unchanged(path, config.max_pixels)
        except InputError:
            if config.on_bad_image == "fail":
                raise
            broken += 1
            if keep:
                keep(position, None)
            continue
        if config.images == "strict":
            _refuse_unusual(path, image)
        unusual = image.shape[0] != 3
        not_rgb += unusual
        first = first or (str(path) if unusual else "")
        if keep:
            keep(position, read(path, max_pixels=config.max_pixels) if unusual else image)
    return Findings(len(positions), broken, not_rgb, first)


def _unchanged(path: str | Where, max_pixels: int) -> Tensor:
    """Decode the image as stored; if only RGB decoding works, return one channel."""
    try:
        return _decode(path, "UNCHANGED", max_pixels).image
    except (RuntimeError, ValueError, OSError):
        return read(path, max_pixels=max_pixels)[:1]
