"""Optimizer, learning-rate schedule and averaged weights."""

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from kfp_ddp.training.config import TrainConfig


def sgd(model: nn.Module, config: TrainConfig) -> torch.optim.SGD:
    """Fused SGD with Nesterov momentum; no weight decay on BatchNorm and biases.

    Leaving them out is worth a few tenths of a point on ImageNet (Jia et al. 2018, section 3.2).
    """
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim <= 1]
    return torch.optim.SGD(
        [
            {"params": decayed, "weight_decay": config.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ],
        lr=peak(config),
        momentum=config.momentum,
        nesterov=config.momentum > 0,
        fused=None if config.strategy == "fsdp" else True,  # DTensors have foreach kernels only
    )


def settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What the optimizer was made with, for each group of parameters."""
    groups = optimizer.param_groups
    return [{name: group[name] for name in group if name != "params"} for group in groups]


def peak(config: TrainConfig) -> float:
    """The peak learning rate, scaled linearly with the batch (Goyal et al. 2017) where asked."""
    if config.lr_reference_batch:
        return config.learning_rate * config.batch_size / config.lr_reference_batch
    return config.learning_rate


def learning_rate(config: TrainConfig, step: int, steps_per_epoch: int) -> float:
    """The rate of step `step` (from 0): linear warm-up, then a cosine to 0 at the last step."""
    warmup = round(config.warmup_epochs * steps_per_epoch)
    if step < warmup:
        return peak(config) * (step + 1) / warmup
    total = config.epochs * steps_per_epoch
    return peak(config) * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))


class Ema:
    """Exponential moving average of a model's weights, with its own BatchNorm statistics."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.model: nn.Module = copy.deepcopy(model).eval().requires_grad_(False)
        self._source: list[Tensor] = list(model.parameters())
        self._average: list[Tensor] = list(self.model.parameters())

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move towards the weights after step `step` (from 0), faster while they change a lot.

        min(decay, (1 + t) / (10 + t)) is the warm-up of tf.train.ExponentialMovingAverage.
        """
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self._average, self._source, 1 - decay)

    @torch.no_grad()
    def copy_buffers(self, model: nn.Module) -> None:
        """Take over the model's BatchNorm statistics."""
        for mine, theirs in zip(self.model.buffers(), model.buffers(), strict=True):
            mine.copy_(theirs)
