"""The order of images that lie in archives: shuffled, and yet read in large pieces."""

import bisect
import itertools
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from kfp_ddp.training.config import TrainConfig
from kfp_ddp.training.read_ahead import PIECE, Piece, in_store_order, runs
from kfp_ddp.training.shards import Slices

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
