"""`python -m kfp_ddp.evaluation.node [torchrun flags] -- FLAGS`: the ranks of a node.

Downloads what is not local first: a dataset that is not on a PVC, and a checkpoint in a bucket. The
node of the first rank uploads the evaluation. With `--rank FLAGS` it is one of these ranks.
"""

import shutil
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from kfp_ddp.core.folders import is_remote
from kfp_ddp.core.step import adopt_secrets
from kfp_ddp.evaluation.ranks import evaluate_share, with_local_folders
from kfp_ddp.evaluation.request import EvaluationRequest, RankRequest
from kfp_ddp.models.evaluation import FILE
from kfp_ddp.runs.workspace import open_workspace
from kfp_ddp.training import node
from kfp_ddp.training.__main__ import leave
from kfp_ddp.training.rank import run_and_report
from kfp_ddp.training.watch import Parent

if TYPE_CHECKING:
    from kfp_ddp.training.distributed import World

RANK = "--rank"
R = TypeVar("R", bound=RankRequest)


def evaluate(torchrun: Sequence[str], flags: Sequence[str]) -> int:
    """Download, run the ranks of this node, and upload; exit codes are as in a training."""
    adopt_secrets()
    request = EvaluationRequest.parse(flags)
    with (
        open_workspace(request.run_dir, "evaluate") as folder,
        with_local_folders(request, folder) as local,
    ):
        local = local.changed(output_dir=local.output_dir or str(local.target))
        code = node.launch(
            torchrun,
            ["kfp_ddp.evaluation.node", RANK, *local.to_argv()],
            Path(local.output_dir),
            check=lambda args: None,
            summary=lambda: "an evaluation restarts from its beginning",
        )
        if is_remote(request.run_dir) and not (local.target / FILE).exists():
            # Its logs could overwrite those of the first rank's node.
            shutil.rmtree(local.target, ignore_errors=True)
        return code


def rank(
    argv: Sequence[str],
    parse: Callable[[Sequence[str]], R] = EvaluationRequest.parse,  # type: ignore[assignment]
    share: Callable[[R, "World"], None] = evaluate_share,  # type: ignore[assignment]
) -> int:
    """Do this rank's share of a request; exit codes are as in a training.

    Always complete: an evaluation has no checkpoints.
    """
    Parent()
    adopt_secrets()

    def join_others(request: R) -> bool:
        from kfp_ddp.training import distributed

        with distributed.joined(request) as world:
            where = f"{socket.gethostname()}, {world.device}"
            print(f"rank {world.rank} of {world.size} on {where}", flush=True)
            share(request, world)
            world.barrier()  # a rank that exits early would count as failed
        return True

    return run_and_report(lambda: parse(argv), join_others)


if __name__ == "__main__":
    if sys.argv[1:2] == [RANK]:
        leave(rank(sys.argv[2:]))
    sys.exit(node.run_node(evaluate))
