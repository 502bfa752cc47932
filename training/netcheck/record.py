"""Settings and result of a network check, and what the result means; free of torch."""

import statistics
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from kfp_ddp.core.settings import Settings


class NetworkCheck(Settings):
    """What is measured, and against what."""

    gradient_mb: float = Field(102.2, gt=0)
    """Megabytes of gradients that the ranks average in a step, four bytes for each parameter of
    the network; a ResNet-50 has 102.2."""
    step_ms: float = Field(0.0, ge=0)
    """Milliseconds that a step computes, as a training tells them; 0 where that is not known."""
    min_gbit_s: float = Field(0.0, ge=0)
    """Gigabits a second that each node must send to each other one; 0 to ask for none."""
    largest_mb: float = Field(64.0, ge=1, le=1024)
    """Megabytes of the largest message, less where the network is slow."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """What the messages lie on: cuda goes by NCCL, cpu by Gloo."""
    timeout_minutes: float = Field(10.0, gt=0)
    """Time-out of a collective."""


RESULT = "network: "
"""What begins the line in which rank 0 says what was found."""
SLOW = 0.5
"""Of what comparable links give: below it a node, a pair or a direction is named."""
SLOW_NAME_MS = 500.0


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Node(_Frozen):
    """A node as its first rank sees it; 0, '' and [] where the kernel does not say."""

    name: str
    host: str
    address: str
    interface: str
    mtu: int
    link_mbit_s: int
    infiniband: list[str]
    dns_ms: float

    @property
    def title(self) -> str:
        """The node, and in a cluster the pod."""
        return self.name if self.name == self.host else f"{self.name} ({self.host})"


class Size(_Frozen):
    """An all-reduce among all ranks.

    Bus bandwidth is 2 (n - 1) / n of the message by the time, as nccl-tests has it, so that it
    compares with that of a link, whatever the number of ranks n.
    """

    bytes: int
    ms: float
    bus_gbit_s: float


class Link(NamedTuple):
    """From one node to another, by their places in the list of nodes."""

    sender: int
    receiver: int
    gbit_s: float


class Network(_Frozen):
    """All of it."""

    ranks: int
    backend: str
    nodes: list[Node]
    latency_us: float
    """Of an all-reduce of four bytes."""
    sizes: list[Size]
    rates: list[list[float]]
    """Gigabits a second from each node to each other, by their places; 0 where not measured."""
    transports: list[str] = []
    """What NCCL said that it goes by."""

    @property
    def links(self) -> list[Link]:
        """What was measured between two nodes."""
        return [
            Link(sender, receiver, rate)
            for sender, row in enumerate(self.rates)
            for receiver, rate in enumerate(row)
            if rate
        ]

    def gradients_ms(self, megabytes: float) -> float:
        """Milliseconds that an all-reduce of so much takes, by the sizes around it."""
        wanted = megabytes * 1e6
        first, last = self.sizes[0], self.sizes[-1]
        if wanted <= first.bytes:
            return first.ms
        for low, high in pairwise(self.sizes):
            if wanted <= high.bytes:
                share = (wanted - low.bytes) / (high.bytes - low.bytes)
                return low.ms + share * (high.ms - low.ms)
        return last.ms * wanted / last.bytes


def problems(found: Network, asked: NetworkCheck) -> list[str]:
    """What is wrong, the worst first, each in a line; empty where nothing is."""
    slow = {node for node, _ in slow_nodes(found)}
    lines = [words for _, words in slow_nodes(found)]
    lines += _slow_links(found, slow)
    if asked.min_gbit_s:
        lines += [
            f"{_pair(found, link)} gives {link.gbit_s:.2f} Gbit/s, less than the "
            f"{asked.min_gbit_s:g} that min_gbit_s asks for"
            for link in sorted(found.links, key=lambda link: link.gbit_s)
            if link.gbit_s < asked.min_gbit_s
        ]
    sizes = {node.mtu for node in found.nodes if node.mtu}
    if len(sizes) > 1:
        each = ", ".join(f"{node.title} {node.mtu}" for node in found.nodes)
        lines.append(f"the MTU is not the same everywhere, large packets may be lost: {each}")
    lines += [
        f"{node.title} takes {node.dns_ms:.0f} ms to find the first node's name: look at its DNS"
        for node in found.nodes
        if node.dns_ms > SLOW_NAME_MS
    ]
    return lines


def slow_nodes(found: Network) -> list[tuple[int, str]]:
    """Nodes whose sending, receiving or both is slow with everybody, and that in words."""
    told = []
    for node in range(len(found.nodes)):
        name = found.nodes[node].title
        sends = [link.gbit_s for link in found.links if link.sender == node]
        takes = [link.gbit_s for link in found.links if link.receiver == node]
        others = [link.gbit_s for link in found.links if node not in (link.sender, link.receiver)]
        if not others:  # two nodes: a direction is held against the other
            if sends and takes and max(sends) < SLOW * min(takes):
                told.append(
                    (
                        node,
                        f"{name} sends {max(sends):.2f} Gbit/s and receives {min(takes):.2f}: "
                        "look at that node, or keep the job away from it",
                    )
                )
            continue
        usual = statistics.median(others)
        does = [
            f"{verb} {statistics.median(rates):.2f} Gbit/s"
            for verb, rates in (("sends", sends), ("receives", takes))
            if rates and max(rates) < SLOW * usual
        ]
        if does:
            told.append(
                (
                    node,
                    f"{name} {' and '.join(does)}, where the others have {usual:.2f}: look at that "
                    "node, or keep the job away from it",
                )
            )
    return told


def _slow_links(found: Network, slow: set[int]) -> list[str]:
    """Pairs that are slow though neither node is with the others."""
    told = []
    for link in found.links:
        if {link.sender, link.receiver} & slow:
            continue
        beside = [
            other.gbit_s
            for other in found.links
            if other is not link
            and {other.sender, other.receiver} & {link.sender, link.receiver}
            and {other.sender, other.receiver} != {link.sender, link.receiver}
            and not {other.sender, other.receiver} & slow
        ]
        if beside and link.gbit_s < SLOW * statistics.median(beside):
            told.append(
                f"{_pair(found, link)} gives {link.gbit_s:.2f} Gbit/s, where both have "
                f"{statistics.median(beside):.2f} with others: look at what lies between them"
            )
    return told


def need(found: Network, asked: NetworkCheck) -> str:
    """What the network makes of a step, in a line; '' for a rank alone."""
    if found.ranks < 2:
        return ""
    ms = found.gradients_ms(asked.gradient_mb)
    said = f"averaging {asked.gradient_mb:g} MB of gradients takes {ms:.0f} ms"
    if not asked.step_ms:
        return f"{said}; it hides behind the backward pass of steps of {1.5 * ms:.0f} ms and more"
    # The backward pass is two thirds of the computing, and the reduction starts within it.
    exposed = max(0.0, ms - asked.step_ms * 2 / 3)
    share = exposed / (asked.step_ms + exposed)
    if not exposed:
        return f"{said}, hidden behind the backward pass of a step of {asked.step_ms:g} ms"
    return f"{said}: {share:.0%} of the time of a step of {asked.step_ms:g} ms waits for it"


def _pair(found: Network, link: Link) -> str:
    return f"{found.nodes[link.sender].title} to {found.nodes[link.receiver].title}"


def table(found: Network, asked: NetworkCheck) -> Iterable[str]:
    """The lines of a Markdown document of it all, whose tables can be read as they stand."""
    wrong, said = problems(found, asked), need(found, asked)
    yield f"## {'The network is not as it should be' if wrong else 'Nothing wrong was found'}"
    yield ""
    yield from (f"- **{line}**" for line in wrong)
    if said:
        yield f"- {said}"
    by = f", {', '.join(found.transports)}" if found.transports else ""
    nodes = f"{len(found.nodes)} nodes" if found.nodes[1:] else "one node"
    yield f"- {found.ranks} ranks on {nodes} by {found.backend}{by}"
    yield f"- an all-reduce of four bytes takes {found.latency_us:.0f} µs"
    yield from _aligned(
        ("node", "interface", "MTU", "link", "InfiniBand", "name found in"),
        *(
            (
                node.title,
                node.interface or "?",
                str(node.mtu or "?"),
                f"{node.link_mbit_s / 1000:g} Gbit/s" if node.link_mbit_s else "?",
                ", ".join(node.infiniband) or "none",
                f"{node.dns_ms:.1f} ms",
            )
            for node in found.nodes
        ),
    )
    if found.sizes:
        rows = ((f"{s.bytes:,} bytes", f"{s.ms:.3f}", f"{s.bus_gbit_s:.2f}") for s in found.sizes)
        yield from _aligned(("all-reduce", "ms", "bus Gbit/s"), *rows)
    if found.links:
        names = [node.title for node in found.nodes]
        rates = {(link.sender, link.receiver): f"{link.gbit_s:.2f}" for link in found.links}
        yield from _aligned(
            ("Gbit/s from \\ to", *names),
            *(
                (name, *(rates.get((at, to), "") for to in range(len(names))))
                for at, name in enumerate(names)
            ),
        )


def _aligned(*rows: Sequence[str]) -> Iterator[str]:
    """A Markdown table, its head first, with columns of one width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))} |"
        for row in rows
    ]
    yield from ("", lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    yield from lines[1:]
