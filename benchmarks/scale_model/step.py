"""One synchronous step, played through: what computes, what travels, and what both wait for."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist


@dataclass(frozen=True)
class Compute:
    """Seconds of one rank's step while nothing else needs its processor."""

    before: float
    """Up to the backward pass: the batch and the forward pass."""
    backward: float
    after: float
    """The optimizer, and what else follows."""

    @property
    def seconds(self) -> float:
        """The step of one rank alone."""
        return self.before + self.backward + self.after

    def slowed(self, by: float) -> "Compute":
        """The same where all of it takes `by` times as long."""
        return Compute(self.before * by, self.backward * by, self.after * by)


@dataclass(frozen=True)
class Transfer:
    """A bucket's all-reduce: `seconds` where nothing else runs, keeping `cores` of a rank busy."""

    ready: float
    seconds: float
    cores: float = 0.0


@dataclass(frozen=True)
class Step:
    """What a step takes; `exposed` is what it waits for transfers after its backward pass."""

    seconds: float
    exposed: float


def play(
    compute: Compute, transfers: Sequence[Transfer], ranks: int = 1, cores: float = math.inf
) -> Step:
    """The step of `ranks` alike that share `cores`: one after another, buckets beside backward.

    Where the ranks' threads together ask for more cores than there are, all go on at the same
    share of their speed, as a fair scheduler lets them (processor sharing). GPUs share nothing:
    their transfers have engines of their own and ask for no core.

    Args:
        compute: A rank's own work.
        transfers: In the order in which they become ready; they travel in this order.
        ranks: How many share the cores.
        cores: How many there are.
    """

    def speed(asked: float) -> float:
        return min(1.0, cores / (ranks * asked)) if asked else 1.0

    clock = compute.before / speed(1.0)
    done, ended = 0.0, clock
    waiting = list(transfers)
    left = waiting[0].seconds if waiting else 0.0
    while done < compute.backward or waiting:
        computes = done < compute.backward
        due = waiting[0].ready * compute.backward if waiting else compute.backward
        travels = bool(waiting) and due <= done
        until = compute.backward if travels else due
        passed = min(until - done if computes else left, left if travels else until - done)
        asked = computes + (waiting[0].cores if travels else 0.0)
        clock += passed / speed(asked)
        if computes:
            done = until if passed == until - done else done + passed
            ended = clock
        if travels:
            left -= passed
            if not left:
                waiting.pop(0)
                left = waiting[0].seconds if waiting else 0.0
    return Step(clock + compute.after / speed(1.0), clock - ended)


def slowest_of(ranks: int, jitter: float) -> float:
    """How much longer a step takes that waits for the slowest of `ranks`.

    The expected largest of n normal deviates, by Blom's approximation, times the relative
    standard deviation `jitter` of a rank's step.
    """
    return 1 + jitter * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
