"""Which images each rank reads in which step: a function of the seed and the step alone."""

import bisect
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from kfp_ddp.core.errors import InputError
from kfp_ddp.pictures.shards import PIECE, Piece, Slices, runs, sort_by_offset
from kfp_ddp.pictures.splits import Index
from kfp_ddp.training.spec.config import TrainConfig

MOST_LANES = 64
_PIECES = 8
"""Least number of pieces in a window of a lane."""
_START = 16
"""Micro-batches of a rank over which the reading of the first windows is distributed."""


class Lane(NamedTuple):
    """Columns `low` to `high` of global batches; starts of windows in `Epoch.drawn`, and an end."""

    low: int
    high: int
    windows: list[int]


class Windows:
    """Shuffles images of archives: pieces in random order, images within windows of pieces.

    A lane of windows fills the same columns of every global batch, so ranks read different pieces.
    """

    def __init__(self, slices: Slices, batch: int, buffer: int) -> None:
        """Prepare global batches of `batch` images, and windows of `buffer` bytes in total."""
        stored = sort_by_offset(slices)
        self.stored = torch.tensor(stored)
        self.lengths = torch.tensor([len(run) for run in runs(slices, stored)])
        self.batch = batch
        self.buffer = max(1, buffer)
        self.bytes = sum(slices.sizes)

    def epoch(self, shuffle: Generator) -> "Epoch":
        """Return the order of an epoch."""
        samples = len(self.stored)
        batch = self.batch
        steps = samples // batch
        if self.bytes <= self.buffer:
            order = torch.randperm(samples, generator=shuffle)[: steps * batch]
            lane = Lane(0, batch, [0, samples])
            starts = (self.lengths.cumsum(0) - self.lengths).tolist()
            return Epoch(order.view(steps, batch), [lane], self.stored, starts)
        drawn, starts = self._drawn(shuffle)
        order = torch.empty(steps, batch, dtype=torch.int64)
        windows = min(steps, -(-self.bytes // self.buffer))
        # Windows of complete steps: their lengths differ by at most one step.
        ends = [number * steps // windows for number in range(windows + 1)]
        lanes = [
            Lane(low, high, [steps * low + end * (high - low) for end in ends])
            for low, high in self._columns()
        ]
        for low, high, edges in lanes:
            shuffled = [
                drawn[a:b][torch.randperm(b - a, generator=shuffle)]
                for a, b in itertools.pairwise(edges)
            ]
            order[:, low:high] = torch.cat(shuffled).view(steps, high - low)
        return Epoch(order, lanes, drawn, starts)

    def _columns(self) -> list[tuple[int, int]]:
        """Return the columns of each lane; windows of a lane must have several pieces."""
        lanes = 1
        while lanes < MOST_LANES and 2 * lanes * _PIECES * PIECE <= self.buffer:
            lanes *= 2
        lanes = min(lanes, self.batch)
        edges = [number * self.batch // lanes for number in range(lanes + 1)]
        return list(itertools.pairwise(edges))

    def _drawn(self, shuffle: Generator) -> tuple[Tensor, list[int]]:
        """Return all images in a random order of their pieces, and the starts of pieces."""
        first = self.lengths.cumsum(0) - self.lengths
        chosen = torch.randperm(len(self.lengths), generator=shuffle)
        lengths = self.lengths[chosen]
        starts = lengths.cumsum(0) - lengths
        moved = (first[chosen] - starts).repeat_interleave(lengths)
        return self.stored[torch.arange(len(self.stored)) + moved], starts.tolist()


def windows_of(slices: Slices | None, config: TrainConfig) -> Windows | None:
    """Create the windows of a run; None for images that are not in archives."""
    if slices is None:
        return None
    return Windows(slices, config.batch_size, int(config.shuffle_buffer_mb * (1 << 20)))


class Classes:
    """Draws the images of an epoch by class, as `sampling` of `TrainConfig` defines."""

    def __init__(self, targets: Sequence[int], sampling: str) -> None:
        sizes = torch.bincount(torch.tensor(targets))
        weights = sizes.double().sqrt() if sampling == "sqrt" else sizes.clamp(max=1).double()
        ends = (weights.cumsum(0) * (len(targets) / weights.sum())).round().long()
        self.counts = ends.diff(prepend=torch.zeros(1, dtype=torch.int64)).tolist()
        self.members = torch.split(torch.tensor(targets).argsort(stable=True), sizes.tolist())
        self.samples = len(targets)

    def epoch(self, shuffle: Generator) -> Tensor:
        """Return images of a class equally often; a repeated one is its position + n * samples."""
        drawn = [
            torch.cat(
                [
                    members[torch.randperm(len(members), generator=shuffle)] + again
                    for again in range(0, -(-count // len(members)) * self.samples, self.samples)
                ]
            )[:count]
            for members, count in zip(self.members, self.counts, strict=True)
            if count
        ]
        order = torch.cat(drawn)
        return order[torch.randperm(len(order), generator=shuffle)]


def classes_of(index: Index, config: TrainConfig) -> Classes | None:
    """Create the classes to draw from; None for each image once. Raise InputError for archives."""
    if config.sampling == "uniform":
        return None
    if index.slices is not None:
        raise InputError(
            f"sampling={config.sampling} repeats single images, but those of a packed dataset are "
            "read in sequence: use class_weights=balanced, or sync with pack=none"
        )
    return Classes(index.targets, config.sampling)


class Epoch(NamedTuple):
    """Order of an epoch: each step's images, and the pieces that contain them."""

    order: Tensor
    """Positions in the index, [steps, images of a global batch]."""
    lanes: list[Lane]
    drawn: Tensor
    """Positions in the index in the order of the pieces."""
    starts: list[int]
    """Starts of pieces in `drawn`."""

    def ahead(self, first_step: int, micro: int, rank: int, world: int) -> dict[int, list[Piece]]:
        """Return the pieces that a rank reads with each micro-batch: a window before it is used."""
        steps, batch = self.order.shape
        mine = batch // micro // world
        last = (steps - first_step) * mine - 1
        pieces = defaultdict[int, list[Piece]](list)
        number = 0
        for lane in self.lanes:
            slots = range(lane.low // micro, (lane.high - 1) // micro + 1)
            if all(slot % world != rank for slot in slots):
                continue
            for step, piece in self._pieces(lane, first_step):
                later = (step - first_step) * mine + number % mine
                pieces[min(number % _START if step == first_step else later, last)].append(piece)
                number += 1
        return pieces

    def _pieces(self, lane: Lane, first_step: int) -> Iterator[tuple[int, Piece]]:
        """Yield the pieces of a lane that are needed from `first_step` on, each with a step."""
        begin = lane.windows[0]
        width = lane.high - lane.low
        for start, end in itertools.pairwise(lane.windows):
            if (end - 1 - begin) // width < first_step:
                continue
            first = bisect.bisect_right(self.starts, start)
            last = bisect.bisect_left(self.starts, end)
            for a, b in itertools.pairwise([start, *self.starts[first:last], end]):
                step = max(first_step, (a - lane.windows[1]) // width - 1)
                yield step, (int(self.drawn[a]), int(self.drawn[b - 1]))


Key = tuple[int, int]
"""(epoch, position in the index): with the seed, all that a training image depends on. The n-th
repetition in an epoch has the position + n * samples."""


class Keys(list[Key]):
    """A micro-batch, and the pieces of archives to read for later ones."""

    ahead: Sequence[Piece] = ()


class ResumableSampler:
    """Distributes the images of each epoch in micro-batches, round robin, from any step on.

    The permutation depends only on (seed, epoch), so the step is the position for any world size.
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
        classes: Classes | None = None,
    ) -> None:
        self.samples = samples
        self.micro = micro
        self.rank = rank
        self.world = world
        self.seed = seed
        self.windows = windows
        self.classes = classes
        self.per_step = batch // micro
        """Micro-batches of a step, a multiple of `world`."""
        self.mine = self.per_step // world
        self.steps = samples // batch

    def batches(self, first_step: int, epochs: int) -> Iterator[list[Key]]:
        """Yield this rank's micro-batches from a step on, in one go: the loaders stay alive."""
        epoch, step = divmod(first_step, self.steps)
        for current in range(epoch, epochs):
            yield from self.epoch(current, step if current == epoch else 0)

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[list[Key]]:
        """Yield this rank's micro-batches of an epoch from its step `first_step` on."""
        shuffle = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**64)
        ahead: dict[int, list[Piece]] = {}
        if self.windows:
            windows = self.windows.epoch(shuffle)
            order = windows.order
            ahead = windows.ahead(first_step, self.micro, self.rank, self.world)
        elif self.classes:
            order = self.classes.epoch(shuffle)
        else:
            order = torch.randperm(self.samples, generator=shuffle)
        for number, micro in enumerate(self._distribute(order, first_step)):
            keys = Keys((epoch, position) for position in micro)
            keys.ahead = ahead.get(number, ())
            yield keys

    def _distribute(self, order: Tensor, first_step: int) -> Iterator[list[int]]:
        used = order.view(-1)[: self.steps * self.per_step * self.micro]
        steps = used.view(self.steps, self.per_step, self.micro)[first_step:]
        for batch in steps[:, self.rank :: self.world]:
            yield from batch.tolist()
