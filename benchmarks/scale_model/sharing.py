"""Ranks on one machine, which share its cores: what the model is held against here.

A rank's own work and gloo's copies and sums all run on the same cores. Alone, a rank has one; as
many ranks as cores slow each other down by what the processor shares (`busy`, measured on ranks
that do not talk); more ranks than cores take turns (`step.play`).
"""

import dataclasses
import math
import statistics
from collections.abc import Sequence
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
    busy: dict[int, float]
    """Seconds of a rank's step alone, by the number of ranks that compute at once."""
    jitter: float
    """The relative standard deviation of a step of a rank that has a core of its own."""

    def step_seconds(self, ranks: int) -> float:
        """The step of `ranks` here, each with a batch of its own."""
        if ranks == 1:
            return self.alone.seconds
        transfers = [self.loopback.transfer(each, ranks) for each in buckets_of(self.gradients)]
        copied = self.loopback.copied * sum(each.size for each in self.gradients)
        compute = self.alone.slowed(self.busy[min(ranks, self.cores)] / self.alone.seconds)
        compute = dataclasses.replace(compute, backward=compute.backward + copied)
        step = play(compute, transfers, ranks, self.cores)
        turns = max(1.0, ranks / self.cores)
        # Of ranks that take turns on a core the step waits for the slowest core, not for a rank.
        return step.seconds * slowest_of(min(ranks, self.cores), self.jitter / math.sqrt(turns))


def spread(steps: Sequence[Sequence[float]]) -> float:
    """The relative standard deviation of steps: of each rank's own, the mean over ranks."""
    return statistics.mean(statistics.stdev(each) / statistics.mean(each) for each in steps)


def undisturbed(machines: Sequence[Machine]) -> Machine:
    """The least of each constant: what else a machine does while it is measured only adds."""
    travels = min((each.loopback for each in machines), key=lambda each: each.byte)
    return Machine(
        machines[0].cores,
        min((each.alone for each in machines), key=lambda each: each.seconds),
        machines[0].gradients,
        dataclasses.replace(
            travels,
            hop=min(each.loopback.hop for each in machines),
            copied=min(each.loopback.copied for each in machines),
        ),
        {count: min(each.busy[count] for each in machines) for count in machines[0].busy},
        min(each.jitter for each in machines),
    )
