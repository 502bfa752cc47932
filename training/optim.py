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
    """The optimizer of a run, fused where it can be: SGD with Nesterov momentum, or AdamW.

    The function `optimizer` of a model's own file comes first; its rates keep their proportions.
    """
    own = own_model.of(config)
    if own and own.optimizer:
        return own.scheduled(network, config, peak(config))
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
    """No weight decay on BatchNorm and biases, and the body apart from the classifier if it must.

    Leaving them out is worth a few tenths of a point on ImageNet (Jia et al. 2018, section 3.2).
    """
    if not body_is_apart(config.freeze_epochs, config.body_lr_factor):
        return _by_decay(list(network.parameters()), config.weight_decay)
    below = {id(weight) for weight in body_of(network)}
    head = [p for p in network.parameters() if id(p) not in below]
    body = _by_decay(body_of(network), config.weight_decay)
    scaled = [{**group, "lr_scale": config.body_lr_factor} for group in body]
    return [*_by_decay(head, config.weight_decay), *scaled]


def _by_decay(weights: list[nn.Parameter], decay: float) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in weights if p.ndim > 1], "weight_decay": decay},
        {"params": [p for p in weights if p.ndim <= 1], "weight_decay": 0.0},
    ]


def body_is_apart(freeze_epochs: int, body_lr_factor: float) -> bool:
    """Whether the weights below the classifier are groups of their own."""
    return freeze_epochs > 0 or body_lr_factor != 1


def body_of(network: nn.Module) -> list[nn.Parameter]:
    """The weights below the classifier."""
    head = f"{model.head_of(network)}."
    return [p for name, p in network.named_parameters() if not name.startswith(head)]


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

    def __init__(self, network: nn.Module, decay: float) -> None:
        self.decay = decay
        self.model: nn.Module = copy.deepcopy(network).eval().requires_grad_(False)
        self._source: list[Tensor] = list(network.parameters())
        self._average: list[Tensor] = list(self.model.parameters())

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move towards the weights after step `step` (from 0), faster while they change a lot.

        min(decay, (1 + t) / (10 + t)) is the warm-up of tf.train.ExponentialMovingAverage.
        """
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self._average, self._source, 1 - decay)

    @torch.no_grad()
    def copy_buffers(self, network: nn.Module) -> None:
        """Take over the network's BatchNorm statistics."""
        for mine, theirs in zip(self.model.buffers(), network.buffers(), strict=True):
            mine.copy_(theirs)


class Body:
    """The weights below the classifier of `network`, which begins to learn with all of them."""

    def __init__(self, network: nn.Module) -> None:
        self.frozen = False
        self._weights = [weight for weight in body_of(network) if weight.requires_grad]
        self._norms = [m for m in network.modules() if isinstance(m, _BatchNorm)]

    def freeze(self, frozen: bool) -> None:
        """Let the weights learn or not; gradients that are there are gone."""
        self.frozen = frozen
        for weight in self._weights:
            weight.requires_grad_(not frozen)
            weight.grad = None
        for norm in self._norms:
            norm.train(not frozen)

    def rest(self) -> None:
        """Keep the statistics of BatchNorms in a network that was put into training mode."""
        if self.frozen:
            self.freeze(True)
