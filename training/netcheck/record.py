"""Settings and result of a network check, and what the result means; free of torch."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from pydantic import Field

from kfp_ddp.core.settings import Settings, Stored


class NetworkCheck(Settings):
    """Settings of a network check: what to measure, and what is enough."""

    gradient_mb: float = Field(102.2, gt=0)
    """Megabytes of gradients that the ranks average in a step, four bytes for each parameter of
    the network; a ResNet-50 has 102.2."""
    step_ms: float = Field(0.0, ge=0)
    """Milliseconds that a step computes, as a training reports them; 0 if not known."""
    min_gbit_s: float = Field(0.0, ge=0)
    """Gigabits a second that each node must send to each other node; 0: no minimum."""
    largest_mb: float = Field(64.0, ge=1, le=1024)
    """Megabytes of the largest message, less where the network is slow."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device of the messages: cuda uses NCCL, cpu uses Gloo."""
    timeout_minutes: float = Field(10.0, gt=0)
    """Time-out of a collective."""


RESULT = "network: "
"""Prefix of the lines in which rank 0 prints the result."""
PIECE = 15000
"""Characters of the result in a line: the log of a pod is split at 16 KiB."""
SLOW = 0.5
"""Share of the rate of comparable links below which a link counts as slow."""
SLOW_NAME_MS = 500.0


class Node(Stored):
    """A node as its first rank sees it; 0, '' and [] where the kernel has no value."""

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
        """Name of the node, and in a cluster of the pod."""
        return self.name if self.name == self.host else f"{self.name} ({self.host})"


class Size(Stored):
    """An all-reduce among all ranks; bus bandwidth as in nccl-tests, comparable with a link's."""

    bytes: int
    ms: float
    bus_gbit_s: float


class Link(NamedTuple):
    """Rate from one node to another, by their positions in the list of nodes."""

    sender: int
    receiver: int
    gbit_s: float


class Network(Stored):
    """Result of a network check."""

    ranks: int
    backend: str
    nodes: list[Node]
    latency_us: float
    """Latency of an all-reduce of four bytes."""
    sizes: list[Size]
    rates: list[list[float]]
    """Gigabits a second from each node to each other, by position; 0 where not measured."""
    transports: list[str] = Field(default_factory=list)
    """Transports that NCCL logged."""

    def lines(self) -> Iterator[str]:
        """Yield the lines in which rank 0 prints the result."""
        text = self.model_dump_json()
        yield from (RESULT + text[at : at + PIECE] for at in range(0, len(text), PIECE))

    @property
    def links(self) -> list[Link]:
        """Measured rates between two nodes."""
        return [
            Link(sender, receiver, rate)
            for sender, row in enumerate(self.rates)
            for receiver, rate in enumerate(row)
            if rate
        ]

    def gradients_ms(self, megabytes: float) -> float:
        """Interpolate the milliseconds of an all-reduce of this size."""
        size = megabytes * 1e6
        first, last = self.sizes[0], self.sizes[-1]
        if size <= first.bytes:
            return first.ms
        for low, high in pairwise(self.sizes):
            if size <= high.bytes:
                share = (size - low.bytes) / (high.bytes - low.bytes)
                return low.ms + share * (high.ms - low.ms)
        return last.ms * size / last.bytes


def problems(network: Network, check: NetworkCheck) -> list[str]:
    """Return one line for each problem, the worst first."""
    slow = slow_nodes(network)
    lines = [*slow.values(), *_slow_links(network, set(slow))]
    if check.min_gbit_s:
        lines += [
            f"{_pair(network, link)} gives {link.gbit_s:.2f} Gbit/s, less than the minimum of "
            f"{check.min_gbit_s:g}"
            for link in sorted(network.links, key=lambda link: link.gbit_s)
            if link.gbit_s < check.min_gbit_s
        ]
    sizes = {node.mtu for node in network.nodes if node.mtu}
    if len(sizes) > 1:
        by_node = ", ".join(f"{node.title} {node.mtu}" for node in network.nodes)
        lines.append(f"the MTU differs between nodes, large packets may be lost: {by_node}")
    lines += [
        f"{node.title} takes {node.dns_ms:.0f} ms to resolve the first node's name: check its DNS"
        for node in network.nodes
        if node.dns_ms > SLOW_NAME_MS
    ]
    return lines


def slow_nodes(network: Network) -> dict[int, str]:
    """Return a line of text for each node that sends or receives slowly with all others."""
    lines = {}
    for number in range(len(network.nodes)):
        sends = [link.gbit_s for link in network.links if link.sender == number]
        takes = [link.gbit_s for link in network.links if link.receiver == number]
        others = [link.gbit_s for link in network.links if number not in link[:2]]
        if others:
            usual = statistics.median(others)
            slow = [
                f"{verb} {statistics.median(rates):.2f} Gbit/s"
                for verb, rates in (("sends", sends), ("receives", takes))
                if rates and max(rates) < SLOW * usual
            ]
            if slow:
                lines[number] = f"{' and '.join(slow)}, where the others have {usual:.2f}"
        elif sends and takes and max(sends) < SLOW * min(takes):  # two nodes: compare directions
            lines[number] = f"sends {max(sends):.2f} Gbit/s and receives {min(takes):.2f}"
    advice = "check that node, or exclude it from the job"
    return {at: f"{network.nodes[at].title} {line}: {advice}" for at, line in lines.items()}


def _slow_links(network: Network, slow: set[int]) -> list[str]:
    """Return a line for each slow pair of nodes that are not slow with other nodes."""
    lines = []
    links = [link for link in network.links if not slow & {*link[:2]}]
    at_node: dict[int, list[Link]] = defaultdict(list)
    for link in links:
        at_node[link.sender].append(link)
        at_node[link.receiver].append(link)
    for link in links:
        pair = {*link[:2]}
        beside = [one.gbit_s for end in pair for one in at_node[end] if pair != {*one[:2]}]
        if beside and link.gbit_s < SLOW * statistics.median(beside):
            lines.append(
                f"{_pair(network, link)} gives {link.gbit_s:.2f} Gbit/s, where both have "
                f"{statistics.median(beside):.2f} with others: check the connection between them"
            )
    return lines


def need(network: Network, check: NetworkCheck) -> str:
    """Describe what the network costs a step, in one line; '' for a single rank."""
    if network.ranks < 2:
        return ""
    ms = network.gradients_ms(check.gradient_mb)
    summary = f"averaging {check.gradient_mb:g} MB of gradients takes {ms:.0f} ms"
    if not check.step_ms:
        return (
            f"{summary}; it is hidden by the backward pass of steps of at least {1.5 * ms:.0f} ms"
        )
    # The backward pass is two thirds of the computing, and the reduction starts within it.
    exposed = max(0.0, ms - check.step_ms * 2 / 3)
    share = exposed / (check.step_ms + exposed)
    if not exposed:
        return f"{summary}, hidden by the backward pass of a step of {check.step_ms:g} ms"
    return f"{summary}: {share:.0%} of the time of a step of {check.step_ms:g} ms waits for it"


def _pair(network: Network, link: Link) -> str:
    return f"{network.nodes[link.sender].title} to {network.nodes[link.receiver].title}"


def table(network: Network, check: NetworkCheck) -> Iterable[str]:
    """Yield the lines of a Markdown document with aligned tables."""
    wrong, summary = problems(network, check), need(network, check)
    yield f"## {'Problems of the network' if wrong else 'No problem was found'}"
    yield ""
    yield from (f"- **{line}**" for line in wrong)
    if summary:
        yield f"- {summary}"
    by = f", {', '.join(network.transports)}" if network.transports else ""
    nodes = f"{len(network.nodes)} nodes" if network.nodes[1:] else "one node"
    yield f"- {network.ranks} ranks on {nodes} by {network.backend}{by}"
    yield f"- an all-reduce of four bytes takes {network.latency_us:.0f} µs"
    yield from _aligned(
        ("node", "interface", "MTU", "link", "InfiniBand", "name resolved in"),
        *(
            (
                node.title,
                node.interface or "?",
                str(node.mtu or "?"),
                f"{node.link_mbit_s / 1000:g} Gbit/s" if node.link_mbit_s else "?",
                ", ".join(node.infiniband) or "none",
                f"{node.dns_ms:.1f} ms",
            )
            for node in network.nodes
        ),
    )
    if network.sizes:
        rows = ((f"{s.bytes:,} bytes", f"{s.ms:.3f}", f"{s.bus_gbit_s:.2f}") for s in network.sizes)
        yield from _aligned(("all-reduce", "ms", "bus Gbit/s"), *rows)
    if network.links:
        names = [node.title for node in network.nodes]
        rates = {(link.sender, link.receiver): f"{link.gbit_s:.2f}" for link in network.links}
        yield from _aligned(
            ("Gbit/s from \\ to", *names),
            *(
                (name, *(rates.get((at, to), "") for to in range(len(names))))
                for at, name in enumerate(names)
            ),
        )


def _aligned(*rows: Sequence[str]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))} |"
        for row in rows
    ]
    yield from ("", lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    yield from lines[1:]
