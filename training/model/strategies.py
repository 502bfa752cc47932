"""Distribution of the network over the ranks (DDP, FSDP), and of its saved state."""

import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.text import one_line
from kfp_ddp.training.distributed import World
from kfp_ddp.training.spec.config import TrainConfig

State = dict[str, Any]

FORMS = {"replicated": "ddp, single or one rank", "sharded": "fsdp over several ranks"}
"""Forms of a saved state, the key in a checkpoint's manifest, and the strategies that read it."""


def form_of(manifest: Mapping[str, Any]) -> str:
    """Return the form in a checkpoint's manifest; older manifests have the text of `FORMS`."""
    form = str(manifest["form"])
    return next((key for key, text in FORMS.items() if text == form), form)


class Strategy:
    """One rank with the complete `network`; a step calls `replicas`. Base of the others."""

    replicas: nn.Module
    form = "replicated"
    """The key in FORMS of the saved state."""
    collective_state = False
    """Whether all ranks must take part in `state`, and in each forward pass."""

    def __init__(self, network: nn.Module, config: TrainConfig) -> None:
        self.network = network
        self.replicas = _compile(network, config)

    def hold_gradients(self, hold: bool) -> contextlib.AbstractContextManager[Any]:
        """Return a context that accumulates gradients; with `hold` they are not exchanged yet."""
        return contextlib.nullcontext()

    def rewrap(self) -> None:
        """Adapt to a change of the weights that require gradients."""

    def state(self, optimizer: torch.optim.Optimizer) -> State:
        """Return references to the complete state, at least on rank 0: copy them before a step."""
        return {"model": self.network.state_dict(), "optimizer": optimizer.state_dict()}

    def restore(self, optimizer: torch.optim.Optimizer, state: State) -> None:
        """Restore what `state` returned; raise for a missing or surplus entry."""
        self.network.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])


class Ddp(Strategy):
    """The complete network on every rank; gradients are averaged during the backward pass."""

    replicas: DistributedDataParallel

    def __init__(
        self, network: nn.Module, config: TrainConfig, world: World, accumulates: bool
    ) -> None:
        self.network, self._device, self._static = network, world.device, not accumulates
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


class Fsdp(Strategy):
    """Each rank has a shard of the weights, and gathers a block to compute it.

    Checkpoints contain the complete state, but resume with fsdp only; gathering blocks the step.
    """

    form = "sharded"
    collective_state = True

    def __init__(self, network: nn.Module, world: World) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, fully_shard

        mesh = init_device_mesh(world.device.type, (world.size,))
        try:
            for block in _blocks(network):
                fully_shard(block, mesh=mesh)
            sharded = fully_shard(network, mesh=mesh)
        except (ValueError, NotImplementedError) as error:  # such as a weight without dimensions
            raise InputError(f"strategy=fsdp: {one_line(error)}; use strategy=ddp") from error
        assert isinstance(sharded, FSDPModule)
        self.network = self.replicas = network
        self._fsdp = sharded

    def hold_gradients(self, hold: bool) -> contextlib.AbstractContextManager[Any]:
        """Switch the reduce-scatter of this backward pass off or on."""
        self._fsdp.set_requires_gradient_sync(not hold)
        return contextlib.nullcontext()

    def state(self, optimizer: torch.optim.Optimizer) -> State:
        """Gather the state on rank 0, on the CPU."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, optim = get_state_dict(self.network, optimizer, options=options)
        return {"model": model, "optimizer": optim}

    def restore(self, optimizer: torch.optim.Optimizer, state: State) -> None:
        """Load this rank's shard of the complete state."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

        set_state_dict(
            self.network,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=StateDictOptions(full_state_dict=True),
        )


def spread(network: nn.Module, config: TrainConfig, world: World, accumulates: bool) -> Strategy:
    """Create the strategy of `config`; fsdp over several ranks moves the network to its device."""
    if world.size == 1:
        return Strategy(network, config)
    if config.strategy == "fsdp":
        return Fsdp(network, world)
    return Ddp(network, config, world, accumulates)


def _compile(network: nn.Module, config: TrainConfig) -> nn.Module:
    if not config.compile:
        return network
    compiled = torch.compile(network)
    assert isinstance(compiled, nn.Module)
    return compiled


def _blocks(network: nn.Module) -> list[nn.Module]:
    """Return the outermost repeated modules with parts, as residual blocks, but not of stages."""
    lists = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
    count = Counter(type(module) for module in network.modules())

    def size(modules: Iterable[nn.Module]) -> int:
        return sum(weight.numel() for module in modules for weight in module.parameters())

    def within(module: nn.Module) -> list[nn.Module]:
        blocks: list[nn.Module] = []
        for child in module.children():
            inner, own = within(child), size([child])
            parts = type(child) not in lists and next(child.children(), None) is not None
            # A stage, such as of timm, is large, and mostly consists of blocks.
            smaller = any(count[type(block)] > count[type(child)] for block in inner)
            divides = smaller and 2 * size(inner) > own > size([network]) / 8
            blocks += [child] if parts and count[type(child)] > 1 and own and not divides else inner
        return blocks

    return within(network)
