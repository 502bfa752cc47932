"""Which images each rank reads in which step: a function of the seed and the step alone."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from kfp_ddp.training.read_ahead import Piece
from kfp_ddp.training.windows import Epoch, Windows

Key = tuple[int, int]
"""(epoch, position in the index): all that a training image depends on, beside the seed."""


class Keys(list[Key]):
    """A micro-batch of images in archives, and what is to be read for later ones."""

    ahead: Sequence[Piece] = ()


class ResumableSampler(DistributedSampler[Any]):
    """Deals an epoch's permutation in micro-batches, round robin, from any step on.

    The permutation depends on (seed, epoch) alone and is cut into global batches of whole
    micro-batches; rank r takes micro-batches r, r + world, ... of each. So the position in the
    data is the step alone, whatever the world size, and the last partial batch is left out.
    `windows` make the permutation of images in archives, and say what to read ahead.

    It is a DistributedSampler in what callers may rely on (rank, num_replicas, seed, set_epoch),
    so that tools which look for one find it; how it deals is its own.
    """

    def __init__(
        self,
        samples: int,
        batch: int,
        micro: int,
        rank: int,
        world: int,
        seed: int,
        windows: Windows | None = None,
    ) -> None:
        super().__init__(range(samples), num_replicas=world, rank=rank, seed=seed)  # type: ignore[arg-type]
        self.samples = samples
        self.micro = micro
        self.per_step = batch // micro
        self.mine = len(range(rank, self.per_step, world))
        self.steps = samples // batch
        self.first_step = 0
        self.windows = windows

    def set_position(self, epoch: int, step: int) -> None:
        """Start the next iteration at step `step` (from 0) of `epoch`."""
        self.set_epoch(epoch)
        self.first_step = step

    def __iter__(self) -> Iterator[list[Key]]:
        """This rank's micro-batches, step after step."""
        shuffle = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        if self.windows is not None:
            yield from self._windowed(self.windows.epoch(shuffle))
            return
        order = torch.randperm(self.samples, generator=shuffle)
        for micro in self._dealt(order):
            yield [(self.epoch, position) for position in micro]

    def _windowed(self, order: Epoch) -> Iterator[Keys]:
        ahead = order.ahead(self.first_step, self.micro, self.rank, self.num_replicas)
        for number, micro in enumerate(self._dealt(order.order)):
            keys = Keys((self.epoch, position) for position in micro)
            keys.ahead = ahead.get(number, ())
            yield keys

    def _dealt(self, order: Tensor) -> Iterator[list[int]]:
        """This rank's micro-batches of an order."""
        used = order.view(-1)[: self.steps * self.per_step * self.micro]
        steps = used.view(self.steps, self.per_step, self.micro)[self.first_step :]
        for batch in steps[:, self.rank :: self.num_replicas]:
            yield from batch.tolist()

    def __len__(self) -> int:
        return (self.steps - self.first_step) * self.mine


class Epochs:
    """The micro-batches of all epochs that remain, one after the other, as one batch sampler.

    One iteration for the whole run keeps the loader's processes and their prefetch alive across
    epoch boundaries; the epoch travels with each position.
    """

    def __init__(self, sampler: ResumableSampler, first_step: int, epochs: int) -> None:
        self.sampler, self.first_step, self.epochs = sampler, first_step, epochs

    def __iter__(self) -> Iterator[list[Key]]:
        epoch, step = divmod(self.first_step, self.sampler.steps)
        for current in range(epoch, self.epochs):
            self.sampler.set_position(current, step if current == epoch else 0)
            yield from self.sampler
