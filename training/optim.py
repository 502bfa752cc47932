"""Optimizer, learning-rate schedule, frozen layers and averaged weights."""

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from kfp_ddp.training import model, own_model
from kfp_ddp.training.config import TrainConfig


def optimizer_of(network: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """Create the optimizer of a run, fused if possible: SGD with Nesterov momentum, or AdamW.

    A function `optimizer` in the user's model file has priority; its rates keep their ratios.
    """
    own = own_model.load_for(config)
    if own and own.optimizer:
        return own.create_optimizer(network, config, peak(config))
    groups = _groups(network, config)
    fused = None if config.strategy == "fsdp" else True  # DTensors have foreach kernels only
    if config.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=peak(config), fused=fused)
    return torch.optim.SGD(
        groups,
        lr=peak(config),
        momentum=config.momentum,
        nesterov=config.momentum > 0,
        fused=fused,
    )


def _groups(network: nn.Module, config: TrainConfig) -> list[dict[str, Any]]:
    """Group parameters: no weight decay on BatchNorm and biases; body and classifier if separate.

    No decay there improves ImageNet by a few tenths of a point (Jia et al. 2018, section 3.2).
    """
    if not has_separate_body(config.freeze_epochs, config.body_lr_factor):
        return _by_decay(list(network.parameters()), config.weight_decay)
    below = {id(weight) for weight in body_weights(network)}
    head = [p for p in network.parameters() if id(p) not in below]
    body = _by_decay(body_weights(network), config.weight_decay)
    scaled = [{**group, "lr_scale": config.body_lr_factor} for group in body]
    return [*_by_decay(head, config.weight_decay), *scaled]


def _by_decay(weights: list[nn.Parameter], decay: float) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in weights if p.ndim > 1], "weight_decay": decay},
        {"params": [p for p in weights if p.ndim <= 1], "weight_decay": 0.0},
    ]


def has_separate_body(freeze_epochs: int, body_lr_factor: float) -> bool:
    """Return whether the weights below the classifier are separate parameter groups."""
    return freeze_epochs > 0 or body_lr_factor != 1


def body_weights(network: nn.Module) -> list[nn.Parameter]:
    """Return the weights below the classifier."""
    head = f"{model.head_of(network)}."
    return [p for name, p in network.named_parameters() if not name.startswith(head)]


def settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the options of the optimizer, for each parameter group."""
    groups = optimizer.param_groups
    return [{name: group[name] for name in group if name != "params"} for group in groups]


def peak(config: TrainConfig) -> float:
    """Return the peak learning rate, scaled linearly with the batch if set (Goyal et al. 2017)."""
    if config.lr_reference_batch:
        return config.learning_rate * config.batch_size / config.lr_reference_batch
    return config.learning_rate


def learning_rate(config: TrainConfig, step: int, steps_per_epoch: int) -> float:
    """Return the rate of step `step` (from 0): linear warm-up, then a cosine to 0."""
    warmup = round(config.warmup_epochs * steps_per_epoch)
    if step < warmup:
        return peak(config) * (step + 1) / warmup
    total = config.epochs * steps_per_epoch
    return peak(config) * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))


class Ema:
    """Exponential moving average of a model's weights, with its own BatchNorm statistics."""

    def __init__(self, network: nn.Module, decay: float) -> None:
        self.decay = decay
        self.model: nn.Module = copy.deepcopy(network).eval().requires_grad_(False)
        self._source: list[Tensor] = list(network.parameters())
        self._average: list[Tensor] = list(self.model.parameters())

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move towards the weights after step `step` (from 0), faster in the first steps.

        min(decay, (1 + t) / (10 + t)) is the warm-up of tf.train.ExponentialMovingAverage.
        """
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self._average, self._source, 1 - decay)

    @torch.no_grad()
    def copy_buffers(self, network: nn.Module) -> None:
        """Copy the network's BatchNorm statistics."""
        for mine, theirs in zip(self.model.buffers(), network.buffers(), strict=True):
            mine.copy_(theirs)


class Body:
    """The layers below the classifier of `network`, which can be frozen."""

    def __init__(self, network: nn.Module) -> None:
        self.frozen = False
        self._weights = [weight for weight in body_weights(network) if weight.requires_grad]
        self._norms = [m for m in network.modules() if isinstance(m, _BatchNorm)]

    def freeze(self, frozen: bool) -> None:
        """Freeze or unfreeze the weights and BatchNorm statistics; clears gradients."""
        self.frozen = frozen
        for weight in self._weights:
            weight.requires_grad_(not frozen)
            weight.grad = None
        for norm in self._norms:
            norm.train(not frozen)

    def keep_frozen(self) -> None:
        """Freeze BatchNorm statistics again after the network was set to training mode."""
        if self.frozen:
            self.freeze(True)
