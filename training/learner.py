"""The network on this rank, how it is spread over all, and what changes its weights."""

from typing import Any

import torch
from torch import nn

from kfp_ddp.training import model, optim, resume
from kfp_ddp.training.config import TrainConfig
from kfp_ddp.training.distributed import World
from kfp_ddp.training.strategies import spread


class Learner:
    """What a run trains; `accumulates` says whether a rank's step has several micro-batches."""

    def __init__(
        self, config: TrainConfig, world: World, classes: tuple[str, ...], accumulates: bool
    ) -> None:
        self.config, self.world = config, world
        torch.manual_seed(config.seed)
        sharded = config.strategy == "fsdp" and world.size > 1
        network = model.of(config, len(classes))
        if config.init_from:
            resume.initialise(network, config, classes, say=world.first)
        # The strategy moves shards, which must be contiguous, to the device block by block: the
        # whole may not fit there.
        self.network = (
            network if sharded else network.to(world.device).to(memory_format=torch.channels_last)
        )
        self.ema = optim.Ema(self.network, config.ema_decay) if config.ema_decay else None
        self.strategy = spread(self.network, config, world, accumulates)
        self.optimizer = optim.sgd(self.network, config)
        bf16 = config.precision == "bf16"
        self.autocast = torch.autocast(world.device.type, torch.bfloat16, enabled=bf16)
        self._norms = [m for m in self.network.modules() if isinstance(m, nn.BatchNorm2d)]

    def set_rate(self, rate: float) -> None:
        """The learning rate of the steps that follow."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def keep_statistics_of(self, number: int, count: int) -> None:
        """Let BatchNorm's running statistics follow the first of `count` micro-batches only.

        Rank 0's are the ones that are saved, and its first is the global batch's first whatever
        the world size, so they do not depend on it.
        """
        if count > 1 and number < 2:
            for norm in self._norms:
                norm.momentum = 0.1 if number == 0 else 0.0

    def update(self, step: int) -> None:
        """Change the weights by the gradients of step `step` (from 0), which are gone after it."""
        if self.config.clip_norm:
            nn.utils.clip_grad_norm_(self.strategy.network.parameters(), self.config.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.ema:
            self.ema.update(step)

    def to_evaluate(self) -> nn.Module:
        """The network to evaluate, with rank 0's BatchNorm statistics on every rank."""
        if self.world.size > 1:
            for buffer in self.network.buffers():
                torch.distributed.broadcast(buffer, src=0)
        if self.ema is None:
            return self.network
        self.ema.copy_buffers(self.network)
        return self.ema.model

    def state(self) -> dict[str, Any]:
        """The whole state, on rank 0 at least: references, to be copied before the next step."""
        state = self.strategy.state(self.optimizer)
        if self.ema:
            self.ema.copy_buffers(self.network)
        state["ema"] = self.ema.model.state_dict() if self.ema else None
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned, with the optimizer's settings of the configuration."""
        settings = optim.settings(self.optimizer)
        self.strategy.restore(self.optimizer, state)
        for group, own in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(own)
        if self.ema:
            self.ema.model.load_state_dict(state["ema"] or state["model"])
