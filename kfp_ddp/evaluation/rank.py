"""`python -m kfp_ddp.evaluation.rank`: one rank of an evaluation, under torch elastic."""

import os
import socket
import sys

from kfp_ddp.core.step import adopt_secrets
from kfp_ddp.evaluation.request import Request
from kfp_ddp.training.__main__ import leave
from kfp_ddp.training.rank import run_and_report
from kfp_ddp.training.watch import Parent


def main() -> int:
    """Evaluate this rank's share; exit codes are as in a training."""
    Parent()
    adopt_secrets()
    return run_and_report(lambda: Request.parse(sys.argv[1:]), run)


def run(request: Request) -> bool:
    """Join the other ranks and evaluate. Always complete: an evaluation has no checkpoints."""
    import torch

    from kfp_ddp.evaluation.ranks import evaluate_share
    from kfp_ddp.training import distributed

    with distributed.joined(request) as world:
        if world.device.type == "cpu":
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // world.local_size))
        where = f"{socket.gethostname()}, {world.device}"
        print(f"rank {world.rank} of {world.size} on {where}", flush=True)
        evaluate_share(request, world)
        world.barrier()  # a rank that exits early would count as failed
    return True


if __name__ == "__main__":
    leave(main())
