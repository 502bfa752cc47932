"""One rank of a network check: its node, and collectives and pairs of nodes, timed."""

import json
import os
import re
import socket
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist

from kfp_ddp.training import distributed
from kfp_ddp.training.distributed import World
from kfp_ddp.training.netcheck.record import Network, NetworkCheck, Node, Size
from kfp_ddp.training.rank import run_and_report

NET, INFINIBAND = Path("/sys/class/net"), Path("/sys/class/infiniband")


def look() -> Node:
    """Describe this node, in a pod by the names of both, and the interface that its ranks use."""
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    address, dns_ms = _route(master)
    chosen = os.environ.get("NCCL_SOCKET_IFNAME") or os.environ.get("GLOO_SOCKET_IFNAME") or ""
    interface = chosen if (NET / chosen).is_dir() and chosen else _interface(address)
    return Node(
        name=os.environ.get("KFP_DDP_NODE") or socket.gethostname(),
        host=socket.gethostname(),
        address=address,
        interface=interface,
        mtu=_number(NET / interface / "mtu") if interface else 0,
        link_mbit_s=max(0, _number(NET / interface / "speed")) if interface else 0,
        infiniband=sorted(path.name for path in INFINIBAND.glob("*")),
        dns_ms=round(dns_ms, 1),
    )


def _route(master: str) -> tuple[str, float]:
    """Return our address towards the first node, and milliseconds to resolve its name."""
    started = time.perf_counter()
    try:
        target = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
    except OSError:
        return "", (time.perf_counter() - started) * 1e3
    took = (time.perf_counter() - started) * 1e3
    with socket.socket(target[0], socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(target[4])  # sends nothing
            return str(probe.getsockname()[0]), took
        except OSError:
            return "", took


def _interface(address: str) -> str:
    """Return the interface with this address; '' if the kernel has none."""
    import fcntl
    import struct

    for _, name in socket.if_nameindex():
        request = struct.pack("256s", name[:15].encode())
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                answer = fcntl.ioctl(probe, 0x8915, request)  # SIOCGIFADDR, netdevice(7)
            except OSError:
                continue
        if socket.inet_ntoa(answer[20:24]) == address:
            return name
    return ""


def _number(file: Path) -> int:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return 0


class RankSettings(NetworkCheck):
    """The settings of a rank: those of the check, and the folder for logs of a failure."""

    output_dir: str
    """Folder of this node."""


def main(argv: Sequence[str]) -> int:
    """Measure, and print the result on rank 0; return 0 or the exit code of an error."""
    return run_and_report(lambda: RankSettings.create(**json.loads(argv[0])), run)


def run(settings: RankSettings) -> bool:
    """Measure with all ranks, and return True; raise a KfpDdpError, as for too few GPUs."""
    nccl = Path(settings.output_dir, f"nccl-{os.environ.get('RANK', '0')}.log")
    os.environ.setdefault("NCCL_DEBUG", "INFO")
    os.environ.setdefault("NCCL_DEBUG_SUBSYS", "INIT,NET,P2P")
    os.environ.setdefault("NCCL_DEBUG_FILE", str(nccl))
    with distributed.joined(settings) as world:
        nodes = world.gather((world.rank, look()) if world.local_rank == 0 else None)
        leaders = [node[0] for node in nodes if node is not None]
        largest, alone = int(settings.largest_mb * 1e6), world.size == 1
        result = Network(
            ranks=world.size,
            backend="nccl" if world.device.type == "cuda" else "gloo",
            nodes=[node[1] for node in nodes if node is not None],
            latency_us=0.0 if alone else latency_us(world),
            sizes=[] if alone else all_reduces(world, largest),
            rates=[] if alone else rates(world, leaders, largest),
            transports=transports(nccl.read_text(errors="replace") if nccl.is_file() else ""),
        )
        if world.first:
            print(*result.lines(), sep="\n", flush=True)
    return True


def transports(log: str) -> list[str]:
    """Return the transports in NCCL's log: `Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM`."""
    return sorted(set(re.findall(r"\bvia (\S+)", log)))


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
        # Rank 0's time on every rank, so that all end at the same size.
        seconds = world.gather(statistics.median(_timed(world, tensor, TIMES)))[0]
        bus = 2 * (world.size - 1) / world.size * size * 8 / seconds / 1e9
        sizes.append(Size(bytes=size, ms=seconds * 1e3, bus_gbit_s=bus))
        if size >= largest or seconds > SECONDS_A_SIZE:
            return sizes
        size = min(size * GROWTH, largest // 4 * 4)


def rates(world: World, leaders: list[int], largest: int) -> list[list[float]]:
    """Measure gigabits a second between nodes' first ranks, in disjoint pairs, at most 47 each."""
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
        took = world.seconds() - started
        best = min(best or took, took)
    return best


def _timed(world: World, tensor: torch.Tensor, times: int) -> list[float]:
    """Return the seconds of each of several all-reduces, after one warm-up."""
    took = []
    for _ in range(times + 1):
        world.barrier()
        started = time.perf_counter()
        dist.all_reduce(tensor)
        took.append(world.seconds() - started)
    return took[1:]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
