"""JPEG files that the GPU decodes: which ones, their pixels, and whether it is worth it."""

import contextlib
import functools
import io
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import NamedTuple, TypeVar

import torch
from PIL import Image
from torch import Tensor

from kfp_ddp.core.log import log
from kfp_ddp.core.text import one_line
from kfp_ddp.pictures.header import frame_of, is_usual, without_extras
from kfp_ddp.pictures.reading import Reading
from kfp_ddp.pictures.shards import Where, content
from kfp_ddp.training.data import transforms
from kfp_ddp.training.data.image_files import END, Decoded, upright
from kfp_ddp.training.data.sampler import Key
from kfp_ddp.training.spec.config import TrainConfig

WAYS = ("cpu", "gpu")
STEPS = 20
"""Steps of each way that `fastest` measures."""
_LARGEST = 4
"""Sides of the largest file, in those of the input: of a larger one, libjpeg decodes less."""
_BITS = 8
T = TypeVar("T")


class File(NamedTuple):
    """A JPEG file for the device, without EXIF."""

    data: bytes
    turn: int
    """Its EXIF orientation, at least 1."""


class Rows(NamedTuple):
    """What the bytes of a micro-batch are, row after row."""

    sizes: list[int]
    turns: list[int]
    """EXIF orientation of a file; 0 for pixels that a loader decoded."""
    epoch: int
    drawn: list[int]
    """Positions as the sampler drew them."""


def obstacle(config: TrainConfig, device: torch.device) -> str:
    """Return why the device cannot decode the images of a run; '' if it can."""
    if device.type != "cuda" or torch.version.hip:
        return "only GPUs of NVIDIA decode JPEG"
    if config.images == "strict":
        return "images=strict checks decoded images in loader processes"
    if config.randaugment or transforms.augmentation(config) == transforms.OWN:
        return "randaugment and transforms of a model file run in loader processes"
    if config.decode == "auto" and config.deterministic:
        return "auto decides by time, which deterministic excludes"
    file = io.BytesIO()
    Image.new("RGB", (16, 16)).save(file, "JPEG")
    try:
        _decode([torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)], device)
    except (ImportError, OSError, RuntimeError) as error:
        return f"torchcodec cannot ({one_line(error)})"
    return ""


def _decode(files: list[Tensor], device: torch.device) -> list[Tensor]:
    # Here, as its CUDA may be another one than torch's: only what needs it must fail.
    from torchcodec.decoders import decode_jpeg  # type: ignore[attr-defined]

    return list(decode_jpeg(files, device=device))


def files_in(places: Iterable[Where], reading: Reading, size: int) -> list[File | None]:
    """Return the files that the device decodes, for inputs of `size`; None where a loader has to.

    They take no more memory than the pixels in their place.
    """
    files: list[File | None] = []
    pixels = 3 * size**2
    room = 0
    for where in places:
        room += pixels
        file = _load(where, reading, size)
        if file and len(file.data) > room:
            file = None
        files.append(file)
        room -= len(file.data) if file else pixels
    return files


def _load(where: Where, reading: Reading, size: int) -> File | None:
    """Return a complete JPEG with three components of 8 bits and the colours of JFIF, not large."""
    try:
        data = content(where, reading.most_bytes)
    except (OSError, ValueError):
        return None
    frame = frame_of(data)
    if frame is None or frame.components != 3:
        return None
    if not data.endswith(END):
        return None
    if not 0 < frame.height * frame.width <= reading.max_pixels:
        return None
    if max(frame.height, frame.width) > _LARGEST * size:
        return None
    names = data[frame.at + 5 : frame.at + 14 : 3]
    if data[frame.at - 1] != _BITS or names == b"RGB":
        return None
    # A GPU's parser has crashed on damaged EXIF: NVIDIA/CUDALibrarySamples#116.
    plain = without_extras(data)
    return File(plain, frame.orientation) if is_usual(plain) else None


def pack(images: Tensor, files: list[File | None], keys: list[Key]) -> tuple[Tensor, Rows]:
    """Return files, and images [3, size, size] where there is none, as bytes."""
    rows = []
    turns = []
    for image, file in zip(images, files, strict=True):
        if file:
            rows.append(torch.frombuffer(bytearray(file.data), dtype=torch.uint8))
            turns.append(file.turn)
        else:
            rows.append(image.permute(1, 2, 0).reshape(-1))
            turns.append(0)
    drawn = [position for _, position in keys]
    return torch.cat(rows), Rows([len(row) for row in rows], turns, keys[0][0], drawn)


def unpack(packed: Tensor, about: Rows, config: TrainConfig, device: torch.device) -> Tensor:
    """Return uint8 images [N, 3, size, size] on the device; raise RuntimeError for damage.

    Decoding is all that differs from a loader, where it is exact, and resizing, by 1 of 255.
    """
    rows = torch.split(packed, about.sizes)
    encoded = [row for row, turn in zip(rows, about.turns, strict=True) if turn]
    decoded = iter(_decode(encoded, device))
    size = transforms.size_of_epoch(config, about.epoch)
    out = transforms.channels_last(len(rows), size, device)
    for image, row, turn, drawn in zip(out, rows, about.turns, about.drawn, strict=True):
        if not turn:
            image.copy_(row.view(size, size, 3).permute(2, 0, 1), non_blocking=True)
            continue
        whole = upright(next(decoded), turn)
        decoded_one = Decoded(whole, *whole.shape[-2:])
        image.copy_(transforms.finish(decoded_one, config, about.epoch, drawn, prepared=False))
    return out


@functools.cache
def warn(why: str) -> None:
    """Print, once, why a rank decodes a micro-batch without its GPU."""
    log.warning(f"a rank decodes a micro-batch without its GPU: {why}")


def fastest(
    begin: Callable[[str, int], Generator[T]],
    per_step: int,
    ready: int,
    clock: Callable[[], float],
    report: Callable[[str], None],
) -> Iterator[T]:
    """Yield micro-batches decoded in one way and then in the other, and the rest in the faster.

    `begin` yields those from a step on, decoded in a way. Of each way, as many steps as loaders
    have `ready` come first, then those whose seconds are measured.
    """
    seconds: dict[str, float] = {}
    for turn, way in enumerate(WAYS):
        with contextlib.closing(begin(way, turn * (ready + STEPS))) as batches:
            yield from itertools.islice(batches, ready * per_step)
            began = clock()
            yield from itertools.islice(batches, STEPS * per_step)
            seconds[way] = clock() - began
    faster = min(seconds, key=lambda way: seconds[way])
    rates = " and ".join(f"{STEPS / seconds[way]:.2f} with {way}" for way in WAYS)
    report(f"decode={faster}, by steps a second: {rates}")
    yield from begin(faster, len(WAYS) * (ready + STEPS))
