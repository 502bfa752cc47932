"""Mixup and CutMix: each image of a micro-batch with a share of the one before it."""

import math
import random

import torch
from torch import Tensor

from kfp_ddp.training.config import TrainConfig


def mixed(images: Tensor, config: TrainConfig, epoch: int, first: int) -> tuple[Tensor, float]:
    """The images and the share of each that is its own; they themselves and 1 where none is asked.

    What is drawn depends on the seed, the epoch and the micro-batch's first position in the index,
    so neither a resume nor the number of ranks changes it.

    Args:
        images: [N, C, H, W], on any device, which is not waited for.
        config: Has `mixup` and `cutmix`, of which one is taken by chance where both are set.
        epoch: From 0.
        first: Position in the index of the first image.
    """
    if not (config.mixup or config.cutmix):
        return images, 1.0
    draw = random.Random(f"mix {config.seed} {epoch} {first}")
    pastes = bool(config.cutmix) and not (config.mixup and draw.random() < 0.5)
    alpha = config.cutmix if pastes else config.mixup
    own = draw.betavariate(alpha, alpha)
    before = torch.cat([images[-1:], images[:-1]])
    if not pastes:
        return torch.lerp(before, images, own), own
    top, bottom, left, right = _box(images.shape[-2], images.shape[-1], 1 - own, draw)
    out = images.clone()
    out[:, :, top:bottom, left:right] = before[:, :, top:bottom, left:right]
    return out, 1 - (bottom - top) * (right - left) / (images.shape[-2] * images.shape[-1])


def _box(height: int, width: int, area: float, draw: random.Random) -> tuple[int, int, int, int]:
    """Top, bottom, left and right of a part of that share of the area, cut off at the edges."""
    high, wide = round(height * math.sqrt(area)), round(width * math.sqrt(area))
    top, left = draw.randrange(height) - high // 2, draw.randrange(width) - wide // 2
    return max(0, top), min(height, top + high), max(0, left), min(width, left + wide)
