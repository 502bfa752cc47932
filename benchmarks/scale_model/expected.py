"""What to expect of N nodes of a kind: a step, the images a second, the start, what is kept."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.scale_model import failures
from benchmarks.scale_model.collective import Gradient, all_reduce_seconds, buckets_of
from benchmarks.scale_model.kinds import Kind
from benchmarks.scale_model.starting import Start
from benchmarks.scale_model.step import Compute, Transfer, play, slowest_of

DAY = 86_400.0
# Of a device's step: a convolution's backward pass is two of its forward passes.
FORWARD, BACKWARD, OPTIMIZER = 0.33, 0.65, 0.02
JITTER = 0.01
"""The relative standard deviation of a rank's step, where it was not measured: assumed."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint: how long it stops the loop, and until it can be gone on from, in seconds."""

    stall: float
    written: float


@dataclass(frozen=True)
class Feed:
    """Where the images come from.

    `per_core` is how many a loader's core delivers a second; `claim` the bytes a second that all
    nodes together read from one claim, each image of `image_bytes`. With `local` a node reads from
    a disk or cache of its own after the first epoch, and the claim bounds nothing.
    """

    per_core: float
    image_bytes: float = 108e3  # ImageNet-1k: 138 GB in 1.28 million files
    claim: float = 1e9
    local: bool = True


@dataclass(frozen=True)
class Expected:
    """What N nodes of a kind come to."""

    nodes: int
    devices: int
    step: float
    exposed: float
    efficiency: float
    """Of a step: images a second against as many devices alone."""
    images_per_s: float
    start: float
    interval: float
    """Seconds between saves that lose least."""
    goodput: float
    """Efficiency times the share of the time that is kept."""
    limit: str
    """What costs most of what is lost."""


def expect(
    kind: Kind,
    nodes: int,
    batch: int,
    gradients: Sequence[Gradient],
    feed: Feed,
    saved: Saved,
    start: Start,
) -> Expected:
    """What `nodes` of `kind` come to with `batch` images a device; see the parts for formulas."""
    devices = nodes * kind.devices
    alone = batch / kind.images_per_s
    compute = Compute(FORWARD * alone, BACKWARD * alone, OPTIMIZER * alone)
    transfers = [
        Transfer(each.ready, all_reduce_seconds(each.size, nodes, kind.devices, kind.network))
        for each in buckets_of(gradients)
    ]
    step = play(compute, transfers if devices > 1 else [])
    together = step.seconds * slowest_of(devices, JITTER)
    fed = _fed(kind, nodes, feed)
    seconds = max(together, batch * kind.devices / fed)
    mtbf = kind.mtbf_days * DAY / nodes
    restart = start.seconds(nodes, kind.devices)
    interval = max(failures.best_interval(saved.stall, mtbf), saved.written)
    share = failures.kept(interval, saved.stall, saved.written, restart, mtbf)
    lost = {
        "network": step.seconds - alone,
        "slowest rank": together - step.seconds,
        "input": seconds - together,
        "failures": seconds * (1 / share - 1),
    }
    limit = max(lost, key=lost.__getitem__)
    return Expected(
        nodes,
        devices,
        seconds,
        step.exposed,
        alone / seconds,
        batch * devices / seconds,
        restart,
        interval,
        alone / seconds * share,
        limit if lost[limit] > 0.01 * seconds else "",
    )


def _fed(kind: Kind, nodes: int, feed: Feed) -> float:
    """Images a second that a node gets."""
    loaded = kind.cores * feed.per_core
    return loaded if feed.local else min(loaded, feed.claim / nodes / feed.image_bytes)


def nodes_of_one_claim(kind: Kind, feed: Feed) -> float:
    """So many nodes are fed by the claim alone, from which each reads each image in each epoch."""
    return feed.claim / (kind.devices * kind.images_per_s * feed.image_bytes)
