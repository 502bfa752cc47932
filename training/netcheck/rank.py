"""One rank of a network check, and what its node reports about itself."""

import json
import os
import re
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from kfp_ddp.training.netcheck.record import RESULT, Network, NetworkCheck, Node
from kfp_ddp.training.rank import run_and_report

NET, INFINIBAND = Path("/sys/class/net"), Path("/sys/class/infiniband")


def look(name: str = "") -> Node:
    """Describe this node and the interface that its ranks use.

    Args:
        name: Name of the node; '' for the host name, which in a pod is the pod's.
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
        infiniband=sorted(path.name for path in INFINIBAND.iterdir())
        if INFINIBAND.is_dir()
        else [],
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
    """Measure with all ranks, and return True.

    Raises:
        KfpDdpError: there are too few GPUs.
    """
    nccl = Path(settings.output_dir, f"nccl-{os.environ.get('RANK', '0')}.log")
    os.environ.setdefault("NCCL_DEBUG", "INFO")
    os.environ.setdefault("NCCL_DEBUG_SUBSYS", "INIT,NET,P2P")
    os.environ.setdefault("NCCL_DEBUG_FILE", str(nccl))
    # From here on torch is needed, which takes seconds to import.
    from kfp_ddp.training import distributed
    from kfp_ddp.training.netcheck import measure

    world = distributed.start(settings)
    try:
        leads = world.local_rank == 0
        nodes = world.gather((world.rank, look()) if leads else None)
        leaders = [node[0] for node in nodes if node is not None]
        largest = int(settings.largest_mb * 1e6)
        alone = world.size == 1
        latency = 0.0 if alone else measure.latency_us(world)
        result = Network(
            ranks=world.size,
            backend="nccl" if world.device.type == "cuda" else "gloo",
            nodes=[node[1] for node in nodes if node is not None],
            latency_us=latency,
            sizes=[] if alone else measure.all_reduces(world, largest),
            rates=[] if alone else measure.rates(world, leaders, largest),
            transports=transports(nccl.read_text(errors="replace") if nccl.is_file() else ""),
        )
        if world.first:
            print(RESULT + result.model_dump_json(), flush=True)
    except BaseException:
        distributed.leave(world, in_order=False)
        raise
    distributed.leave(world, in_order=True)
    return True


def transports(log: str) -> list[str]:
    """Return the transports in NCCL's log: `Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM`."""
    return sorted(set(re.findall(r"\bvia (\S+)", log)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
