"""Image files: decoding, and what is unusual or broken about them."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kfp_ddp.core.errors import InputError
from kfp_ddp.training import fractions
from kfp_ddp.training.config import MAX_PIXELS, TrainConfig
from kfp_ddp.training.fractions import Decoded, Needed
from kfp_ddp.training.header import pixels_of
from kfp_ddp.training.shards import Where, content

Keep = Callable[[int, Tensor | None], None]
Mode = Literal["RGB", "UNCHANGED"]

_MOST_BYTES_A_PIXEL = 8
_MOST_EXTRA = 2**26
"""Bytes of a file that are no pixels: profiles, thumbnails."""


def read(path: str | Where, strict: bool = False, max_pixels: int = MAX_PIXELS) -> Tensor:
    """Decode one image to RGB uint8 [3, H, W], turned as its EXIF data say.

    Raises:
        InputError: the file cannot be read or decoded, or holds more than `max_pixels`; or, if
            `strict`, is not RGB and square.
    """
    image = _read(path, "UNCHANGED" if strict else "RGB", max_pixels).image
    if strict:
        _refuse_unusual(path, image)
    return image


def read_part(path: str | Where, max_pixels: int, needed: Needed) -> Decoded:
    """As `read`, but of a JPEG of three channels no more than is `needed`.

    Raises:
        InputError: as `read`.
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
        raise InputError(f"{path} is an animation: replace it by one image")
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
    part = fractions.decoded(data, needed) if needed else None
    if part:
        return part
    # A tensor of its own: torchcodec's way from bytes changes the filters of warnings each time.
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
    """What `examine` saw in the images it decoded."""

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
    """Decode the images at `positions` in full and hand each, in RGB, to `keep`.

    `where` tells where an image is; `keep` gets None for one that cannot be read.

    Raises:
        InputError: a broken image where `on_bad_image` is fail, or an unusual one where `images`
            is strict.
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
    """The image as stored; what only RGB decoding can read counts as one channel."""
    try:
        return _decode(path, "UNCHANGED", max_pixels).image
    except (RuntimeError, ValueError, OSError):
        return read(path, max_pixels=max_pixels)[:1]
