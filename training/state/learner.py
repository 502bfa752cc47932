"""The trained state of a rank: network, strategy, optimizer and averaged weights."""

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from kfp_ddp.training.distributed import World, autocast
from kfp_ddp.training.model import networks, own_model
from kfp_ddp.training.model.convolutions import use_products
from kfp_ddp.training.model.strategies import spread
from kfp_ddp.training.spec.config import TrainConfig
from kfp_ddp.training.state.initial_weights import initialise


def optimizer_of(network: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """Create the optimizer: that of the user's file, or SGD with Nesterov momentum, or AdamW."""
    own = own_model.load_for(config)
    if own and own.optimizer:
        return own.create_optimizer(network, config, peak(config))
    rate = peak(config)
    decay = config.weight_decay
    groups = _group_by_decay(list(network.parameters()), decay)
    if has_separate_body(config.freeze_epochs, config.body_lr_factor):
        body = body_weights(network)
        below = {id(weight) for weight in body}
        head = [weight for weight in network.parameters() if id(weight) not in below]
        groups_of_body = _group_by_decay(body, decay)
        for group in groups_of_body:
            group["lr_scale"] = config.body_lr_factor
        groups = [*_group_by_decay(head, decay), *groups_of_body]
    if config.optimizer == "adamw":
        return torch.optim.AdamW(groups, rate, fused=True)
    momentum = config.momentum
    return torch.optim.SGD(groups, rate, momentum, nesterov=momentum > 0, fused=True)


def _group_by_decay(weights: list[nn.Parameter], decay: float) -> list[dict[str, Any]]:
    """Group weights: no decay on vectors, such as biases (Jia et al. 2018, section 3.2)."""
    return [
        {"params": [p for p in weights if p.ndim > 1], "weight_decay": decay},
        {"params": [p for p in weights if p.ndim <= 1], "weight_decay": 0.0},
    ]


def _options_of(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def has_separate_body(freeze_epochs: int, body_lr_factor: float) -> bool:
    """Return whether the weights below the classifier are separate parameter groups."""
    return freeze_epochs > 0 or body_lr_factor != 1


def body_weights(network: nn.Module) -> list[nn.Parameter]:
    """Return the weights below the classifier."""
    heads = networks.heads_of(network)
    return [p for name, p in network.named_parameters() if not name.startswith(heads)]


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
        """Average, with the warm-up of the decay of tf.train.ExponentialMovingAverage."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self._average, self._source, 1 - decay)

    @torch.no_grad()
    def copy_buffers(self, network: nn.Module) -> None:
        """Copy the network's BatchNorm statistics."""
        for mine, theirs in zip(self.model.buffers(), network.buffers(), strict=True):
            mine.copy_(theirs)


class Learner:
    """The trained state; `accumulates`: a rank has several micro-batches in a step."""

    def __init__(
        self, config: TrainConfig, world: World, classes: tuple[str, ...], accumulates: bool
    ) -> None:
        self.config = config
        self.world = world
        torch.manual_seed(config.seed)
        network = networks.build_for(config, len(classes))
        if config.starts_from_weights:
            initialise(network, config, classes, report=world.first)
        if world.device.type == "cpu" and not config.compile:
            use_products(network)
        self.network = network.to(world.device).to(memory_format=torch.channels_last)
        self.ema = Ema(self.network, config.ema_decay) if config.ema_decay else None
        self.strategy = spread(self.network, config, world, accumulates)
        self.optimizer = optimizer_of(self.network, config)
        self.autocast = autocast(world.device, config.precision)
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=config.precision == "fp16")
        self._frozen = False
        body = body_weights(self.network) if config.freeze_epochs else []
        self._body = [weight for weight in body if weight.requires_grad]
        norms = [m for m in self.network.modules() if isinstance(m, _BatchNorm)]
        self._norms = [(norm, norm.momentum) for norm in norms]

    def set_rate(self, rate: float) -> None:
        """Set the learning rate of the following steps."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_scale", 1.0)

    def begin_epoch(self, epoch: int) -> None:
        """Freeze the body in the first `freeze_epochs`, and train it in later epochs."""
        frozen = epoch < self.config.freeze_epochs
        if self._frozen != frozen:
            self._frozen = frozen
            for weight in self._body:
                weight.requires_grad_(not frozen)
                weight.grad = None
            self.train()
            self.strategy.rewrap()

    def train(self) -> None:
        """Set the network to training mode, except frozen BatchNorm statistics."""
        self.network.train()
        for norm, _ in self._norms:
            norm.train(not self._frozen)

    def limit_statistics(self, number: int, count: int) -> None:
        """Let the first of `count` micro-batches alone update the statistics that rank 0 saves."""
        if count > 1 and number < 2:
            for norm, momentum in self._norms:
                norm.momentum = momentum if number == 0 else 0.0

    def seed_step(self, step: int, micro_batch: int) -> None:
        """Seed dropout and the like by seed and position; `micro_batch` counts over all ranks."""
        seed = ((self.config.seed * 1_000_003 + step) * 1_000_003 + micro_batch) % 2**63
        torch.default_generator.manual_seed(seed)
        if self.world.device.type != "cpu":
            torch.get_device_module(self.world.device).manual_seed(seed)

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradients of a loss."""
        torch.autograd.backward(self.scaler.scale(loss))

    def update(self, step: int) -> None:
        """Update the weights, clear gradients; with fp16, an overflow only changes the scale."""
        if self.config.clip_norm:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.network.parameters(), self.config.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        if self.ema:
            self.ema.update(step)

    def to_evaluate(self) -> nn.Module:
        """Return the network to evaluate, with rank 0's BatchNorm statistics on every rank."""
        if self.world.size > 1:
            for buffer in self.network.buffers():
                torch.distributed.broadcast(buffer, src=0)
        if self.ema is None:
            return self.network
        self.ema.copy_buffers(self.network)
        return self.ema.model

    def state(self) -> dict[str, Any]:
        """Return references to the complete state: copy them before the next step."""
        state: dict[str, Any] = {
            "model": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        if self.ema:
            self.ema.copy_buffers(self.network)
        state["ema"] = self.ema.model.state_dict() if self.ema else None
        if self.scaler.is_enabled():
            state["scaler"] = self.scaler.state_dict()
        return state

    def volatile(self) -> list[Tensor] | None:
        """Return the state that a forward pass may change; None if a user's network may do more."""
        if self.config.model_code:
            return None
        averaged = self.ema.model.buffers() if self.ema else ()
        return [*self.network.buffers(), *averaged]

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned, with the optimizer settings of the configuration."""
        # Loading replaces the options of the groups by those of the earlier run.
        options = [_options_of(group) for group in self.optimizer.param_groups]
        self.network.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for group, own in zip(self.optimizer.param_groups, options, strict=True):
            group.update(own)
        if self.ema:
            self.ema.model.load_state_dict(state["ema"] or state["model"])
        if self.scaler.is_enabled() and "scaler" in state:
            self.scaler.load_state_dict(state["scaler"])
