"""Ranks on one machine, which share its cores: what the model is held against here.

A rank's own work and gloo's copies and sums all run on the same cores. Alone, a rank has one; as
many ranks as cores slow each other down by what the processor shares (`slowed`, measured on ranks
that do not talk); more ranks than cores take turns (`step.play`).
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.scale_model.collective import Gradient, buckets_of, ring_bytes
from benchmarks.scale_model.step import Compute, Transfer, play, slowest_of


@dataclass(frozen=True)
class AllReduce:
    """Two ranks' all-reduce of some size, and what it takes to have it in its bucket before.

    Seconds; `processor` those of a rank's cores in the all-reduce. DistributedDataParallel divides
    each gradient by the number of ranks while it copies it into its bucket.
    """

    size: int
    seconds: float
    processor: float
    copied: float


@dataclass(frozen=True)
class Loopback:
    """What gloo's ring costs between ranks of one machine: seconds a hop, and for a byte sent."""

    hop: float
    byte: float
    cores: float
    """Of a rank, busy while bytes travel."""
    copied: float
    """Seconds to have a byte in its bucket."""

    @classmethod
    def of(cls, small: AllReduce, large: AllReduce) -> "Loopback":
        """From two sizes that two ranks exchanged: two hops each."""
        sent = ring_bytes(large.size - small.size, 2)
        seconds = large.seconds - small.seconds
        cores = (large.processor - small.processor) / seconds
        return cls(small.seconds / 2, seconds / sent, cores, large.copied / large.size)

    def transfer(self, bucket: Gradient, ranks: int) -> Transfer:
        """A bucket's ring among `ranks`."""
        seconds = 2 * (ranks - 1) * self.hop + ring_bytes(bucket.size, ranks) * self.byte
        return Transfer(bucket.ready, seconds, self.cores)


@dataclass(frozen=True)
class Machine:
    """What was measured of this one."""

    cores: int
    alone: Compute
    gradients: Sequence[Gradient]
    loopback: Loopback
    slowed: dict[int, float]
    """By the number of ranks that compute at once, how much longer each takes."""
    jitter: float
    """The relative standard deviation of a step of a rank that has a core of its own."""

    def step_seconds(self, ranks: int) -> float:
        """The step of `ranks` here, each with a batch of its own."""
        if ranks == 1:
            return self.alone.seconds
        transfers = [self.loopback.transfer(each, ranks) for each in buckets_of(self.gradients)]
        copied = self.loopback.copied * sum(each.size for each in self.gradients)
        compute = self.alone.slowed(self.slowed[min(ranks, self.cores)])
        compute = dataclasses.replace(compute, backward=compute.backward + copied)
        step = play(compute, transfers, ranks, self.cores)
        turns = max(1.0, ranks / self.cores)
        # Of ranks that take turns on a core the step waits for the slowest core, not for a rank.
        return step.seconds * slowest_of(min(ranks, self.cores), self.jitter / math.sqrt(turns))


def spread(steps: Sequence[Sequence[float]]) -> float:
    """The relative standard deviation of steps: of each rank's own, the mean over ranks."""
    return statistics.mean(statistics.stdev(each) / statistics.mean(each) for each in steps)


def typical(machines: Sequence[Machine]) -> Machine:
    """The median of each constant, of a machine that was measured several times."""

    def middle(read: Callable[[Machine], float]) -> float:
        return statistics.median(map(read, machines))

    first = machines[0]
    return Machine(
        first.cores,
        Compute(
            middle(lambda each: each.alone.before),
            middle(lambda each: each.alone.backward),
            middle(lambda each: each.alone.after),
        ),
        first.gradients,
        Loopback(
            middle(lambda each: each.loopback.hop),
            middle(lambda each: each.loopback.byte),
            middle(lambda each: each.loopback.cores),
            middle(lambda each: each.loopback.copied),
        ),
        {
            count: statistics.median(each.slowed[count] for each in machines)
            for count in first.slowed
        },
        middle(lambda each: each.jitter),
    )
