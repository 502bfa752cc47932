"""How the network is spread over the ranks, and how its whole state is gathered and restored."""

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kfp_ddp.training.config import TrainConfig
from kfp_ddp.training.distributed import World

State = dict[str, Any]

FORMS = {"replicated": "ddp, single or one rank", "sharded": "fsdp over several ranks"}
"""Forms of a saved state, by the key in a checkpoint's manifest: which strategies read it."""


def form_of(manifest: Mapping[str, Any]) -> str:
    """The key of the form that a checkpoint's manifest tells; older ones hold the text."""
    told = str(manifest["form"])
    return next((key for key, text in FORMS.items() if text == told), told)


class Strategy:
    """One rank with the whole network; the others change what differs over several ranks.

    `network` is what the state is of, `replicas` what a step calls.
    """

    def __init__(self, network: nn.Module, config: TrainConfig, world: World) -> None:
        self.network = network
        self.world = world
        self.replicas: nn.Module = network

    form = "replicated"
    """The key in FORMS of the state that this one saves."""
    collective_state = False
    """Whether all ranks must take part in `state`, and in each forward pass."""

    def hold_gradients(self, hold: bool) -> contextlib.AbstractContextManager[Any]:
        """A context in which gradients are accumulated; with `hold` they are not exchanged yet."""
        return contextlib.nullcontext()

    def exchange_anew(self) -> None:
        """Other weights than before require gradients from now on."""

    def state(self, optimizer: torch.optim.Optimizer) -> State:
        """The whole model and optimizer state, on rank 0 at least.

        References, not copies: to be copied before the next step.
        """
        return {"model": self.network.state_dict(), "optimizer": optimizer.state_dict()}

    def restore(self, optimizer: torch.optim.Optimizer, state: State) -> None:
        """Take over what `state` returned; a missing or surplus entry raises."""
        self.network.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])


class Ddp(Strategy):
    """The whole network on every rank, gradients averaged while the backward pass goes on."""

    def __init__(
        self, network: nn.Module, config: TrainConfig, world: World, accumulates: bool
    ) -> None:
        super().__init__(network, config, world)
        self._static = not accumulates
        self._ddp = self._wrapped(_compiled(network, config))
        self.replicas = self._ddp

    def _wrapped(self, network: nn.Module) -> DistributedDataParallel:
        return DistributedDataParallel(
            network,
            device_ids=[self.world.device] if self.world.device.type == "cuda" else None,
            forward_sync_buffers=False,  # training uses batch statistics; synchronised at need
            gradient_as_bucket_view=True,
            static_graph=self._static,
        )

    def exchange_anew(self) -> None:
        """DDP knows only the weights that required gradients when it was made."""
        self._ddp._remove_autograd_hooks()  # type: ignore[no-untyped-call]
        self._ddp = self._wrapped(self._ddp.module)
        self.replicas = self._ddp

    def hold_gradients(self, hold: bool) -> contextlib.AbstractContextManager[Any]:
        """DistributedDataParallel's no_sync."""
        return self._ddp.no_sync() if hold else contextlib.nullcontext()


class Fsdp(Strategy):
    """Each rank holds a share of the weights and gathers a block when it computes it.

    A block moves to the device when it is sharded, so the device never holds the whole network.
    Checkpoints hold the whole state, so `load_model` reads them as any other; gathering it takes
    part of every rank and blocks the step. They resume with fsdp only.
    """

    form = "sharded"
    collective_state = True

    def __init__(self, network: nn.Module, config: TrainConfig, world: World) -> None:
        super().__init__(network, config, world)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, fully_shard

        mesh = init_device_mesh(world.device.type, (world.size,))
        for block in _blocks(network):
            fully_shard(block, mesh=mesh)
        sharded = fully_shard(network, mesh=mesh)
        assert isinstance(sharded, FSDPModule)
        self._fsdp = sharded

    def hold_gradients(self, hold: bool) -> contextlib.AbstractContextManager[Any]:
        """Switches the reduce-scatter of this backward pass off or on."""
        self._fsdp.set_requires_gradient_sync(not hold)
        return contextlib.nullcontext()

    def state(self, optimizer: torch.optim.Optimizer) -> State:
        """Gathered on rank 0, on the CPU."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, optim = get_state_dict(self.network, optimizer, options=options)
        return {"model": model, "optimizer": optim}

    def restore(self, optimizer: torch.optim.Optimizer, state: State) -> None:
        """Each rank takes its share of the whole state."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

        set_state_dict(
            self.network,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=StateDictOptions(full_state_dict=True),
        )


def spread(network: nn.Module, config: TrainConfig, world: World, accumulates: bool) -> Strategy:
    """The strategy of `config`; one rank needs none.

    `network` is on its device, but for fsdp over several ranks, which moves it there itself.
    """
    if world.size == 1:
        alone = Strategy(network, config, world)
        alone.replicas = _compiled(network, config)
        return alone
    if config.strategy == "fsdp":
        return Fsdp(network, config, world)
    return Ddp(network, config, world, accumulates)


def _compiled(network: nn.Module, config: TrainConfig) -> nn.Module:
    if not config.compile:
        return network
    compiled = torch.compile(network)
    assert isinstance(compiled, nn.Module)
    return compiled


def _blocks(network: nn.Module) -> list[nn.Module]:
    """The residual blocks: the units in which weights are gathered."""
    return [
        module
        for module in network.modules()
        if type(module).__name__ in ("BasicBlock", "Bottleneck", "CifarBlock")
    ]
