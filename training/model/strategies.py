"""Distribution of the network over the ranks."""

import contextlib
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kfp_ddp.training.distributed import World
from kfp_ddp.training.spec.config import TrainConfig


class Strategy:
    """One rank with the complete network; a step calls `replicas`. Base of `Ddp`."""

    replicas: nn.Module

    def __init__(self, network: nn.Module, config: TrainConfig) -> None:
        self.replicas = _compile(network, config)

    def hold_gradients(self, hold: bool) -> contextlib.AbstractContextManager[Any]:
        """Return a context that accumulates gradients; with `hold` they are not exchanged yet."""
        return contextlib.nullcontext()

    def rewrap(self) -> None:
        """Adapt to a change of the weights that require gradients."""


class Ddp(Strategy):
    """The complete network on every rank; gradients are averaged during the backward pass."""

    replicas: DistributedDataParallel

    def __init__(
        self, network: nn.Module, config: TrainConfig, world: World, accumulates: bool
    ) -> None:
        self._device = world.device
        self._static = not accumulates
        self.replicas = self._wrap(_compile(network, config))

    def _wrap(self, network: nn.Module) -> DistributedDataParallel:
        return DistributedDataParallel(
            network,
            device_ids=[self._device] if self._device.type == "cuda" else None,
            forward_sync_buffers=False,  # training uses batch statistics; synchronised at need
            gradient_as_bucket_view=True,
            static_graph=self._static,
        )

    def rewrap(self) -> None:
        """Create DDP again: it only knows the weights that required gradients at its creation."""
        self.replicas._remove_autograd_hooks()  # type: ignore[no-untyped-call]
        self.replicas = self._wrap(self.replicas.module)

    def hold_gradients(self, hold: bool) -> contextlib.AbstractContextManager[Any]:
        """Return DistributedDataParallel's no_sync."""
        return self.replicas.no_sync() if hold else contextlib.nullcontext()


def spread(network: nn.Module, config: TrainConfig, world: World, accumulates: bool) -> Strategy:
    """Create the strategy of these ranks for a network on its device."""
    if world.size == 1:
        return Strategy(network, config)
    return Ddp(network, config, world, accumulates)


def _compile(network: nn.Module, config: TrainConfig) -> nn.Module:
    if not config.compile:
        return network
    compiled = torch.compile(network)
    assert isinstance(compiled, nn.Module)
    return compiled
