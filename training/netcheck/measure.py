"""Collectives and pairs of nodes, timed by the ranks."""

import statistics
import time
from collections.abc import Iterator
from itertools import islice

import torch
import torch.distributed as dist

from kfp_ddp.training.distributed import World
from kfp_ddp.training.netcheck.record import Size

SMALLEST, GROWTH, TIMES = 4096, 8, 5
SECONDS_A_SIZE = 1.0
"""A size that takes longer is the last one."""
LINK_SECONDS = 0.25
"""Approximate seconds to measure one link."""
FIRST_MESSAGE = 1 << 20
ROUNDS = 47


def latency_us(world: World) -> float:
    """Return the latency of an all-reduce of four bytes in microseconds, median of 50."""
    return statistics.median(_timed(world, torch.zeros(1, device=world.device), 50)) * 1e6


def all_reduces(world: World, largest: int) -> list[Size]:
    """Time all-reduces of growing messages up to `largest` bytes; the same list on every rank."""
    sizes: list[Size] = []
    size = SMALLEST
    while True:
        tensor = torch.zeros(size // 4, device=world.device)
        seconds = _from_first(world, statistics.median(_timed(world, tensor, TIMES)))
        bus = 2 * (world.size - 1) / world.size * size * 8 / seconds / 1e9
        sizes.append(Size(bytes=size, ms=seconds * 1e3, bus_gbit_s=bus))
        if size >= largest or seconds > SECONDS_A_SIZE:
            return sizes
        size = min(size * GROWTH, largest // 4 * 4)


def rates(world: World, leaders: list[int], largest: int) -> list[list[float]]:
    """Measure gigabits a second between the first ranks of nodes, in disjoint pairs.

    Each node is paired with all others, or with 47 of them if there are more than 48 nodes.

    Args:
        world: This rank; all ranks take part, those that are not first in a node only wait.
        leaders: The first rank of each node.
        largest: Bytes of the largest message.

    Returns:
        Rates by sender and receiver, 0 for pairs that were not measured; the same on every rank.
    """
    mine: dict[tuple[int, int], float] = {}
    for pairs in islice(rounds(len(leaders)), ROUNDS):
        for one, other in pairs:
            for sender, receiver in ((one, other), (other, one)):
                ends = leaders[sender], leaders[receiver]
                if world.rank in ends:
                    rate = _rate(world, *ends, largest)
                    if world.rank == ends[0]:
                        mine[sender, receiver] = float(f"{rate:.3g}")
        world.barrier()
    all_rates = {pair: rate for part in world.gather(mine) for pair, rate in part.items()}
    places = range(len(leaders))
    return [[all_rates.get((sender, receiver), 0.0) for receiver in places] for sender in places]


def rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """Yield rounds of disjoint pairs that cover all pairs once, by the circle method."""
    seats: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    half = len(seats) // 2
    for _ in range(len(seats) - 1):
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        yield [(a, b) for a, b in pairs if a is not None and b is not None]
        seats = [seats[0], seats[-1], *seats[1:-1]]


def _rate(world: World, sender: int, receiver: int, largest: int) -> float:
    """Measure gigabits a second from one rank to another, acknowledged; 0 at the receiver."""
    seconds = _sent(world, sender, receiver, FIRST_MESSAGE, times=2)
    length = torch.zeros(1, dtype=torch.int64, device=world.device)
    if world.rank == sender:
        fits = FIRST_MESSAGE * LINK_SECONDS / max(seconds, 1e-9)
        length[0] = int(min(max(fits, FIRST_MESSAGE), largest))
        dist.send(length, receiver)
    else:
        dist.recv(length, sender)
    size = int(length)
    seconds = _sent(world, sender, receiver, size, times=3)
    return size * 8 / seconds / 1e9 if seconds else 0.0


def _sent(world: World, sender: int, receiver: int, size: int, times: int) -> float:
    """Return the seconds of the fastest of several messages and its acknowledgement."""
    message = torch.zeros(size, dtype=torch.uint8, device=world.device)
    answer = torch.zeros(1, dtype=torch.uint8, device=world.device)
    best = 0.0
    for _ in range(times):
        if world.rank == receiver:
            dist.recv(message, sender)
            dist.send(answer, sender)
            continue
        started = time.perf_counter()
        dist.send(message, receiver)
        dist.recv(answer, receiver)
        _synchronise(world)
        took = time.perf_counter() - started
        best = min(best or took, took)
    return best


def _timed(world: World, tensor: torch.Tensor, times: int) -> list[float]:
    """Return the seconds of each of several all-reduces, after one warm-up."""
    took = []
    for _ in range(times + 1):
        world.barrier()
        started = time.perf_counter()
        dist.all_reduce(tensor)
        _synchronise(world)
        took.append(time.perf_counter() - started)
    return took[1:]


def _synchronise(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)


def _from_first(world: World, value: float) -> float:
    """Return rank 0's value on every rank."""
    return world.from_first(lambda: value)
