"""Transforms of a decoded image to the network's input, on uint8; mixup and CutMix."""

import functools
import math
import random
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kfp_ddp.pictures.reading import PADDING, READING, Reading
from kfp_ddp.training.data.image_files import Decoded, Need
from kfp_ddp.training.model import own_model
from kfp_ddp.training.spec.config import TrainConfig

_SPARE = 1.5
"""With this margin, a partially decoded image differs after resizing by 0.4 to 1.5 of 255 on
average (measured on photographs); at 1.0 it is sharper, by 1 to 3."""
_LINE = 1000
"""Aspect ratio from which an image counts as a line: resized it would take 200 MB at 224 px."""


class Augmentation(NamedTuple):
    """Random parts of a transform."""

    crop: bool = False
    shift: bool = False
    flip: bool = False


OWN = "own"
AUGMENTATIONS = {
    "none": Augmentation(),
    "shift": Augmentation(shift=True),
    "shift-flip": Augmentation(shift=True, flip=True),
    "crop": Augmentation(crop=True),
    "crop-flip": Augmentation(crop=True, flip=True),
    OWN: Augmentation(),  # what a user's file does is not known here
}
"""By name in the setting `augment`."""


def augmentation(config: TrainConfig) -> str:
    """Return the augmentation of a run, with "auto" resolved; OWN for that of a user's file."""
    own = own_model.load_for(config)
    if own and own.transforms:
        return OWN
    if config.augment != "auto":
        return config.augment
    return "shift" if config.model.startswith("cifar") else "crop-flip"


def size_of_epoch(config: TrainConfig, epoch: int) -> int:
    """Return height and width in pixels: linear over three quarters of the epochs, by 32 or 4."""
    final = config.train_image_size or config.image_size
    start = config.start_image_size or final
    share = min(1.0, epoch / (0.75 * config.epochs))
    if start == final or share == 1:
        return final
    multiple = 32 if final >= 64 else 4
    grown = start + (final - start) * share
    return min(final, max(start, round(grown / multiple) * multiple))


def generator(seed: int, epoch: int, index: int) -> random.Random:
    """Create the random generator of one image in one epoch, the only source of augmentation."""
    return random.Random(((seed << 20) + epoch << 40) + index)


def _is_fixed(config: TrainConfig, for_training: bool) -> bool:
    """Return whether every epoch starts with the same square of an image."""
    fixed = size_of_epoch(config, 0) == size_of_epoch(config, config.epochs)
    name = augmentation(config)
    parts = name == OWN or AUGMENTATIONS[name].crop
    return not for_training or (fixed and not parts)


def prepare(image: Tensor, config: TrainConfig, for_training: bool) -> Tensor:
    """Apply what is the same in every epoch, which a cache stores; it resamples crops twice."""
    if _is_fixed(config, for_training):
        return evaluate(image, _prepared_size(config, for_training), config.reading)
    height, width = image.shape[-2:]
    short = short_side(_prepared_size(config, for_training), config.reading.crop)
    side = max(height, width) if config.fit == "pad" else min(height, width)
    scale = short / side
    return resize(image, round(height * scale), round(width * scale)) if scale < 1 else image


def _prepared_size(config: TrainConfig, for_training: bool) -> int:
    return config.train_image_size or config.image_size if for_training else config.image_size


def prepared_bytes(config: TrainConfig, for_training: bool) -> int:
    """Estimate the bytes of a prepared image: photographs are about 4:3."""
    size = _prepared_size(config, for_training)
    short = short_side(size, config.reading.crop)
    return size**2 * 3 if _is_fixed(config, for_training) else short**2 * 4


def finish(
    decoded: Decoded, config: TrainConfig, epoch: int, position: int, prepared: bool
) -> Tensor:
    """Apply the random part of a training image's transform: to uint8 [3, size, size]."""
    image = decoded.image
    size = size_of_epoch(config, epoch)
    augment = AUGMENTATIONS[augmentation(config)]
    draw = generator(config.seed, epoch, position)
    own = own_model.load_for(config)
    if own and own.transforms:
        return own.apply_transforms(image, size, draw)
    if augment.crop:
        crop = _drawn(config, decoded.height, decoded.width, draw)
        inside = config.fit != "pad"
        image = _cut(image, _in_divided(crop, image, decoded.divisor, inside=inside))
    elif not (prepared and _is_fixed(config, for_training=True)):
        image = evaluate(image, size, config.reading)
    if augment.shift:
        image = _shift(image, max(1, size // 8), draw)
    if augment.flip and draw.random() < 0.5:
        image = image.flip(-1)
    image = resize(image, size, size)  # of a crop; after the flip, which makes it contiguous
    if config.randaugment:
        torch.default_generator.manual_seed(draw.getrandbits(63))  # which torchvision uses
        image = _operations(config.randaugment)(image)
    return image


def evaluate(image: Tensor, size: int, reading: Reading = READING) -> Tensor:
    """Return the square that stands for an image: uint8 [3, H, W] to uint8 [3, size, size]."""
    if reading.fit == "squash":
        return resize(image, size, size)
    if reading.fit == "pad":
        return _padded(image, size)
    return _centre(image, size, reading.crop)


def _padded(image: Tensor, size: int) -> Tensor:
    """Return all of an image between bars of PADDING."""
    height, width = image.shape[-2:]
    scale = size / max(height, width)
    image = resize(image, max(1, round(height * scale)), max(1, round(width * scale)))
    high, wide = image.shape[-2:]
    return _cut(image, Crop((high - size) // 2, (wide - size) // 2, size, size))


def _centre(image: Tensor, size: int, crop: float) -> Tensor:
    """Cut the centre of an image."""
    if max(image.shape[-2:]) > _LINE * min(image.shape[-2:]):
        image = _middle_of_line(image)
    height, width = image.shape[-2:]
    short = short_side(size, crop)
    scale = short / min(height, width)
    image = resize(image, max(short, round(height * scale)), max(short, round(width * scale)))
    top = (image.shape[-2] - size) // 2
    left = (image.shape[-1] - size) // 2
    return image[:, top : top + size, left : left + size]


def _middle_of_line(image: Tensor) -> Tensor:
    """Cut multiples of the shorter side off a line's ends, which do not influence its centre."""
    short = min(image.shape[-2:])
    for side in (-2, -1):
        cut = max(0, image.shape[side] - 4 * short - 4) // 2 // short * short
        image = image.narrow(side, cut, image.shape[side] - 2 * cut)
    return image


def short_side(size: int, crop: float = 0.0) -> int:
    """Return the shorter side in pixels before the centre is cut, as for ImageNet (256 for 224).

    `crop` is the share that is left, 0 for that of ImageNet; small images are not cut.
    """
    return round(size / min(1.0, crop or 0.875)) if size >= 128 else size


def resize(image: Tensor, height: int, width: int) -> Tensor:
    """Resize bilinearly with antialiasing, on uint8; return the image itself if the size fits.

    It is made contiguous first: a strided crop takes twice the time.
    """
    if image.shape[-2:] == (height, width):
        return image
    packed = image.permute(1, 2, 0).contiguous()[None].permute(0, 3, 1, 2)
    return _interpolate(packed, (height, width), exact=image.device.type == "cpu")[0]


def _interpolate(images: Tensor, size: tuple[int, int], *, exact: bool) -> Tensor:
    """Resize with fixed-point weights, or by way of float32: a GPU has no kernel for uint8."""
    values = images if exact else images.float()
    values = F.interpolate(values, size=size, mode="bilinear", antialias=True)
    return values if exact else values.round().to(torch.uint8)


def channels_last(count: int, size: int, device: torch.device | None = None) -> Tensor:
    """Allocate uint8 images [count, 3, size, size], channels last in memory."""
    images = torch.empty(count, size, size, 3, dtype=torch.uint8, device=device)
    return images.permute(0, 3, 1, 2)


class Crop(NamedTuple):
    """A part of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


def _crop(height: int, width: int, min_area: float, draw: random.Random) -> Crop:
    """Draw a random part of an image, aspect 3:4 to 4:3 (Szegedy et al. 2014)."""
    for _ in range(10):
        area = height * width * draw.uniform(min_area, 1.0)
        aspect = math.exp(draw.uniform(math.log(3 / 4), math.log(4 / 3)))
        wide = round(math.sqrt(area * aspect))
        high = round(math.sqrt(area / aspect))
        if 0 < wide <= width and 0 < high <= height:
            break
    else:
        wide = min(height, width)
        high = wide
    top = draw.randint(0, height - high)
    left = draw.randint(0, width - wide)
    return Crop(top, left, high, wide)


def _drawn(config: TrainConfig, height: int, width: int, draw: random.Random) -> Crop:
    """Draw a random part of the square that `fit` makes of an image, in pixels of the image.

    With fit=pad it may lie partly outside of it; with fit=squash it has other proportions.
    """
    if config.fit == "crop":
        return _crop(height, width, config.crop_min_area, draw)
    side = max(height, width)
    crop = _crop(side, side, config.crop_min_area, draw)
    if config.fit == "pad":
        top = crop.top - (side - height) // 2
        left = crop.left - (side - width) // 2
        return Crop(top, left, crop.height, crop.width)
    high = max(1, crop.height * height // side)
    wide = max(1, crop.width * width // side)
    return Crop(crop.top * height // side, crop.left * width // side, high, wide)


def _cut(image: Tensor, crop: Crop) -> Tensor:
    """Return a part of an image, with PADDING for what lies outside of it."""
    top = max(0, crop.top)
    left = max(0, crop.left)
    bottom = max(0, crop.top + crop.height)
    inner = image[:, top:bottom, left : max(0, crop.left + crop.width)]
    high, wide = inner.shape[-2:]
    if (high, wide) == (crop.height, crop.width):
        return inner
    colour = torch.tensor(PADDING, dtype=torch.uint8, device=image.device)
    whole = colour[:, None, None].repeat(1, crop.height, crop.width)
    whole[:, top - crop.top :][:, :high, left - crop.left :][:, :, :wide] = inner
    return whole


def needed(config: TrainConfig, epoch: int, position: int, height: int, width: int) -> Need:
    """Return what the random crop of `finish` needs, divided to `_SPARE` times the input."""
    if not AUGMENTATIONS[augmentation(config)].crop:
        return Need(1, height)
    crop = _drawn(config, height, width, generator(config.seed, epoch, position))
    least = _SPARE * size_of_epoch(config, epoch)
    short = min(crop.height, crop.width)
    by = next((by for by in (8, 4, 2) if short >= by * least), 1)
    return Need(by, min(height, max(1, crop.top + crop.height)))


def _in_divided(crop: Crop, image: Tensor, by: int, *, inside: bool) -> Crop:
    """Return the same part of an image that was divided as it was decoded."""
    top, left, high, wide = (round(side / by) for side in crop)
    if inside:  # rounded up, it may end a pixel behind the image
        top = min(top, image.shape[-2] - high)
        left = min(left, image.shape[-1] - wide)
    return Crop(top, left, high, wide)


def _shift(image: Tensor, by: int, draw: random.Random) -> Tensor:
    """Shift by up to `by` pixels in each direction; new pixels are black."""
    top = by - draw.randint(-by, by)
    left = by - draw.randint(-by, by)
    height, width = image.shape[-2:]
    return F.pad(image, (by, by, by, by))[:, top : top + height, left : left + width]


@functools.cache
def _operations(magnitude: int) -> Callable[[Tensor], Tensor]:
    from torchvision.transforms import v2  # 1.5 s to import: only where it is needed

    operations: Callable[[Tensor], Tensor] = v2.RandAugment(magnitude=magnitude)
    return operations


def _pastes(config: TrainConfig, draw: random.Random) -> bool:
    """Return whether a batch gets CutMix: with mixup, too, every second one does."""
    if not config.mixup or not config.cutmix:
        return bool(config.cutmix)
    return draw.random() >= 0.5


def mixed(images: Tensor, config: TrainConfig, epoch: int, first: int) -> tuple[Tensor, float]:
    """Mix each image with the previous one (mixup or CutMix); return also its own share.

    Random numbers depend on seed, epoch and first position: neither a resume nor ranks change them.
    """
    if not (config.mixup or config.cutmix):
        return images, 1.0
    draw = random.Random(f"mix {config.seed} {epoch} {first}")
    pastes = _pastes(config, draw)
    alpha = config.cutmix if pastes else config.mixup
    own = draw.betavariate(alpha, alpha)
    before = torch.cat([images[-1:], images[:-1]])
    if not pastes:
        return torch.lerp(before, images, own), own
    height, width = images.shape[-2:]
    high = round(height * math.sqrt(1 - own))
    wide = round(width * math.sqrt(1 - own))
    top = draw.randrange(height) - high // 2
    left = draw.randrange(width) - wide // 2
    rows = slice(max(0, top), top + high)
    columns = slice(max(0, left), left + wide)
    out = images.clone()
    out[:, :, rows, columns] = before[:, :, rows, columns]
    return out, 1 - out[0, 0, rows, columns].numel() / (height * width)
