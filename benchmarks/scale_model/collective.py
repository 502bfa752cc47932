"""How long an all-reduce takes, and in which buckets gradients travel."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

MIB = 2**20
# DistributedDataParallel's own: a small first bucket, then bucket_cap_mb.
FIRST_BUCKET, BUCKET = MIB, 25 * MIB


@dataclass(frozen=True)
class Network:
    """What joins ranks in a node and nodes with each other.

    Bandwidths are bus bandwidths in GB/s as nccl-tests defines them: bytes that a rank sends in a
    ring, by the time. Latencies are microseconds a hop, `base_us` those of a call.
    """

    inside: float
    outside: float
    inside_us: float
    outside_us: float
    base_us: float = 8.4
    tree: bool = True
    """Whether the library knows trees, as NCCL does and gloo does not."""


# Of a tree's bandwidth to a ring's, and a hop's microseconds: NCCL's own estimates for its
# protocol Simple, src/graph/tuning.cc.
TREE_SHARE = 0.92


def ring_bytes(size: float, ranks: int) -> float:
    """Bytes that each rank sends to all-reduce `size` bytes in a ring: 2 (n - 1) / n of them."""
    return 2 * (ranks - 1) / ranks * size


def all_reduce_seconds(size: float, nodes: int, per_node: int, network: Network) -> float:
    """Seconds to all-reduce `size` bytes: the better of a ring and a tree, after NCCL's tuning.cc.

    A ring has 2 (n - 1) hops, 2 (N - 1) of them between nodes; a tree goes through each node's
    ranks and log2 N nodes, up and down.
    """
    ranks = nodes * per_node
    if ranks == 1:
        return 0.0
    bandwidth = 1e9 * (min(network.inside, network.outside) if nodes > 1 else network.inside)
    between = 2 * (nodes - 1)
    hops = (2 * (ranks - 1) - between) * network.inside_us + between * network.outside_us
    seconds = ring_bytes(size, ranks) / bandwidth + (network.base_us + hops) * 1e-6
    if not network.tree or nodes == 1:
        return seconds
    hops = 2 * ((per_node - 1) * network.inside_us + math.log2(nodes) * network.outside_us)
    tree = ring_bytes(size, ranks) / (bandwidth * TREE_SHARE) + (network.base_us + hops) * 1e-6
    return min(seconds, tree)


@dataclass(frozen=True)
class Gradient:
    """One parameter's gradient; `ready` is the share of the backward pass that it waits for."""

    size: int
    ready: float


def buckets_of(
    gradients: Sequence[Gradient], first: int = FIRST_BUCKET, cap: int = BUCKET
) -> list[Gradient]:
    """What travels together: gradients in the order they are ready, up to `cap` bytes or over it.

    As DistributedDataParallel groups them once it has seen a backward pass.
    """
    buckets: list[Gradient] = []
    size = 0
    for gradient in gradients:
        size += gradient.size
        if size >= (cap if buckets else first):
            buckets.append(Gradient(size, gradient.ready))
            size = 0
    if size:
        buckets.append(Gradient(size, gradients[-1].ready))
    return buckets
