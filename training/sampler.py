"""Which images each rank reads in which step: a function of the seed and the step alone."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DistributedSampler

Key = tuple[int, int]
"""(epoch, position in the index): all that a training image depends on, beside the seed."""


class ResumableSampler(DistributedSampler[Any]):
    """Deals an epoch's permutation in micro-batches, round robin, from any step on.

    The permutation depends on (seed, epoch) alone and is cut into global batches of whole
    micro-batches; rank r takes micro-batches r, r + world, ... of each. So the position in the
    data is the step alone, whatever the world size, and the last partial batch is left out.

    It is a DistributedSampler in what callers may rely on (rank, num_replicas, seed, set_epoch),
    so that tools which look for one find it; how it deals is its own.
    """

    def __init__(
        self, samples: int, batch: int, micro: int, rank: int, world: int, seed: int
    ) -> None:
        super().__init__(range(samples), num_replicas=world, rank=rank, seed=seed)  # type: ignore[arg-type]
        self.samples = samples
        self.micro = micro
        self.per_step = batch // micro
        self.mine = len(range(rank, self.per_step, world))
        self.steps = samples // batch
        self.first_step = 0

    def set_position(self, epoch: int, step: int) -> None:
        """Start the next iteration at step `step` (from 0) of `epoch`."""
        self.set_epoch(epoch)
        self.first_step = step

    def __iter__(self) -> Iterator[list[Key]]:
        """This rank's micro-batches, step after step."""
        shuffle = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = torch.randperm(self.samples, generator=shuffle)
        used = order[: self.steps * self.per_step * self.micro]
        steps = used.view(self.steps, self.per_step, self.micro)[self.first_step :]
        for batch in steps[:, self.rank :: self.num_replicas]:
            for micro in batch.tolist():
                yield [(self.epoch, position) for position in micro]

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
