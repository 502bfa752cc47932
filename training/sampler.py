"""Which images each rank reads in which step: a function of the seed and the step alone."""

import bisect
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor
from torch.utils.data import DistributedSampler

from kfp_ddp.training.config import TrainConfig
from kfp_ddp.training.shards import PIECE, Piece, Slices, in_store_order, runs

MOST_LANES = 64
_PIECES = 8
"""How many pieces at least are in a window of a lane."""
_START = 16
"""Micro-batches of a rank over which the reading of the first windows is spread."""


class Lane(NamedTuple):
    """Columns `low` to `high` of every global batch, and where its windows begin in `Epoch.drawn`.

    The last entry of `windows` is where the last one ends.
    """

    low: int
    high: int
    windows: list[int]


class Windows:
    """Deals the images of archives: pieces at random, images at random within a window of pieces.

    The pieces of all archives, drawn at random for each epoch, are cut into lanes, and each lane
    into windows in which images are shuffled. A lane fills the same columns of every global
    batch: so ranks, which compute different columns, read different pieces, and the order depends
    on seed, epoch, batch and the size of the windows alone.

    Where one window holds all images, the order is that of plain files.
    """

    def __init__(self, slices: Slices, batch: int, buffer: int) -> None:
        """For global batches of `batch` images and windows of, together, `buffer` bytes."""
        stored = in_store_order(slices)
        self.stored = torch.tensor(stored)
        self.lengths = torch.tensor([len(run) for run in runs(slices, stored)])
        self.batch, self.buffer, self.bytes = batch, max(1, buffer), sum(slices.sizes)

    def epoch(self, shuffle: Generator) -> "Epoch":
        """The order of an epoch."""
        samples, batch = len(self.stored), self.batch
        steps = samples // batch
        if self.bytes <= self.buffer:
            order = torch.randperm(samples, generator=shuffle)[: steps * batch]
            lane = Lane(0, batch, [0, samples])
            starts = (self.lengths.cumsum(0) - self.lengths).tolist()
            return Epoch(order.view(steps, batch), [lane], self.stored, starts)
        drawn, starts = self._drawn(shuffle)
        order = torch.empty(steps, batch, dtype=torch.int64)
        windows = min(steps, -(-self.bytes // self.buffer))
        lanes = [_lane(low, high, steps, windows) for low, high in self._columns()]
        for low, high, edges in lanes:
            shuffled = [
                drawn[a:b][torch.randperm(b - a, generator=shuffle)]
                for a, b in itertools.pairwise(edges)
            ]
            order[:, low:high] = torch.cat(shuffled).view(steps, high - low)
        return Epoch(order, lanes, drawn, starts)

    def _columns(self) -> list[tuple[int, int]]:
        """The columns of each lane: as many lanes as have windows of several pieces."""
        lanes = 1
        while lanes < MOST_LANES and 2 * lanes * _PIECES * PIECE <= self.buffer:
            lanes *= 2
        lanes = min(lanes, self.batch)
        edges = [number * self.batch // lanes for number in range(lanes + 1)]
        return list(itertools.pairwise(edges))

    def _drawn(self, shuffle: Generator) -> tuple[Tensor, list[int]]:
        """All images in the order of their pieces, drawn at random, and where pieces begin."""
        first = self.lengths.cumsum(0) - self.lengths
        chosen = torch.randperm(len(self.lengths), generator=shuffle)
        lengths = self.lengths[chosen]
        starts = lengths.cumsum(0) - lengths
        moved = (first[chosen] - starts).repeat_interleave(lengths)
        return self.stored[torch.arange(len(self.stored)) + moved], starts.tolist()


def windows_of(slices: Slices | None, config: TrainConfig) -> Windows | None:
    """The windows of a run on these images; None where they are files of their own."""
    if slices is None:
        return None
    return Windows(slices, config.batch_size, int(config.shuffle_buffer_mb * (1 << 20)))


class Epoch(NamedTuple):
    """An epoch: each step's images, and what they are read from."""

    order: Tensor
    """Positions in the index, [steps, images of a global batch]."""
    lanes: list[Lane]
    drawn: Tensor
    """Positions in the index in the order of the pieces."""
    starts: list[int]
    """Where in `drawn` a piece begins."""

    def ahead(self, first_step: int, micro: int, rank: int, world: int) -> dict[int, list[Piece]]:
        """What a rank is to read ahead with each of its micro-batches, counted from `first_step`.

        A window is read while the one before it is used; the first ones while training begins.
        """
        steps, batch = self.order.shape
        mine = len(range(rank, batch // micro, world))
        last = (steps - first_step) * mine - 1
        found = defaultdict[int, list[Piece]](list)
        number = 0
        for lane in self.lanes:
            slots = range(lane.low // micro, (lane.high - 1) // micro + 1)
            if all(slot % world != rank for slot in slots):
                continue
            for step, piece in self._pieces(lane, first_step):
                later = (step - first_step) * mine + number % mine
                found[min(number % _START if step == first_step else later, last)].append(piece)
                number += 1
        return found

    def _pieces(self, lane: Lane, first_step: int) -> Iterator[tuple[int, Piece]]:
        """The pieces of a lane that are of use from `first_step` on, and when to read each."""
        begin, width = lane.windows[0], lane.high - lane.low
        for start, end in itertools.pairwise(lane.windows):
            if (end - 1 - begin) // width < first_step:
                continue
            within = bisect.bisect_right(self.starts, start), bisect.bisect_left(self.starts, end)
            for a, b in itertools.pairwise([start, *self.starts[slice(*within)], end]):
                step = max(first_step, (a - lane.windows[1]) // width - 1)
                yield step, (int(self.drawn[a]), int(self.drawn[b - 1]))


def _lane(low: int, high: int, steps: int, windows: int) -> Lane:
    """Windows of whole steps, whose lengths differ by one step at most."""
    edges = [number * steps // windows for number in range(windows + 1)]
    return Lane(low, high, [steps * low + edge * (high - low) for edge in edges])


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
