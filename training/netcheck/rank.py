"""One rank of a check of the network."""

import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from kfp_ddp.training.netcheck.record import RESULT, Network
from kfp_ddp.training.netcheck.seen import look
from kfp_ddp.training.netcheck.settings import NetworkCheck
from kfp_ddp.training.rank import told


class Asked(NetworkCheck):
    """The same, with the folder for what explains a failure."""

    output_dir: str
    """Of this node."""


def main(argv: Sequence[str]) -> int:
    """Measure, and print what was found on rank 0; the exit code is 0, or that of an error."""
    return told(lambda: Asked.create(**json.loads(argv[0])), run)


def run(asked: Asked) -> bool:
    """Measure with all ranks.

    Raises:
        KfpDdpError: there are too few GPUs.
    """
    nccl = Path(asked.output_dir, f"nccl-{os.environ.get('RANK', '0')}.log")
    os.environ.setdefault("NCCL_DEBUG", "INFO")
    os.environ.setdefault("NCCL_DEBUG_SUBSYS", "INIT,NET,P2P")
    os.environ.setdefault("NCCL_DEBUG_FILE", str(nccl))
    # From here on torch is needed, which takes seconds to import.
    from kfp_ddp.training import distributed
    from kfp_ddp.training.netcheck import measure

    world = distributed.start(asked)
    try:
        leads = world.local_rank == 0
        nodes = world.gather((world.rank, look()) if leads else None)
        leaders = [each[0] for each in nodes if each is not None]
        largest = int(asked.largest_mb * 1e6)
        alone = world.size == 1
        latency = 0.0 if alone else measure.latency_us(world)
        found = Network(
            ranks=world.size,
            backend="nccl" if world.device.type == "cuda" else "gloo",
            nodes=[each[1] for each in nodes if each is not None],
            latency_us=latency,
            sizes=[] if alone else measure.all_reduces(world, largest),
            rates=[] if alone else measure.rates(world, leaders, largest),
            transports=transports(nccl.read_text(errors="replace") if nccl.is_file() else ""),
        )
        if world.first:
            print(RESULT + found.model_dump_json(), flush=True)
    except BaseException:
        distributed.leave(world, in_order=False)
        raise
    distributed.leave(world, in_order=True)
    return True


def transports(log: str) -> list[str]:
    """The roads that NCCL's log names: `Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM`."""
    return sorted(set(re.findall(r"\bvia (\S+)", log)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
