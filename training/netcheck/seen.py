"""What a node sees of its own network, from the kernel's files; no torch."""

import os
import socket
import time
from pathlib import Path

from kfp_ddp.training.netcheck.record import Node

NET, INFINIBAND = Path("/sys/class/net"), Path("/sys/class/infiniband")


def look(name: str = "") -> Node:
    """This node: the interface that its ranks meet the others by, and what that says of itself.

    Args:
        name: Of the node; '' for that of the host, which in a pod is the pod's.
    """
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    address, dns_ms = _route(master)
    chosen = os.environ.get("NCCL_SOCKET_IFNAME") or os.environ.get("GLOO_SOCKET_IFNAME") or ""
    interface = chosen if (NET / chosen).is_dir() and chosen else _interface(address)
    return Node(
        name=name or os.environ.get("KFP_DDP_NODE") or socket.gethostname(),
        host=socket.gethostname(),
        address=address,
        interface=interface,
        mtu=_number(NET / interface / "mtu") if interface else 0,
        link_mbit_s=max(0, _number(NET / interface / "speed")) if interface else 0,
        infiniband=sorted(each.name for each in INFINIBAND.iterdir())
        if INFINIBAND.is_dir()
        else [],
        dns_ms=round(dns_ms, 1),
    )


def _route(master: str) -> tuple[str, float]:
    """The address that packets to the first node leave from, and milliseconds to find its name."""
    started = time.perf_counter()
    try:
        found = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
    except OSError:
        return "", (time.perf_counter() - started) * 1e3
    took = (time.perf_counter() - started) * 1e3
    with socket.socket(found[0], socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(found[4])  # sends nothing
            return str(probe.getsockname()[0]), took
        except OSError:
            return "", took


def _interface(address: str) -> str:
    """The interface that has the address; '' where the kernel does not say."""
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
