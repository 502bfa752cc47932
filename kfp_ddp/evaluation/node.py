"""`python -m kfp_ddp.evaluation.node [torchrun flags] -- FLAGS`: the ranks of a node.

Downloads what is not local first: a dataset that is not on a PVC, and a checkpoint in a bucket. The
node of the first rank uploads the evaluation. With `--rank FLAGS` it is one of these ranks.
"""

import shutil
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kfp_ddp.core.folders import is_remote
from kfp_ddp.core.log import log
from kfp_ddp.core.step import adopt_secrets
from kfp_ddp.evaluation.ranks import evaluate_share, with_local_folders
from kfp_ddp.evaluation.request import EvaluationRequest, PredictionRequest, RankRequest, parse
from kfp_ddp.models.evaluation import FILE
from kfp_ddp.runs.workspace import open_workspace
from kfp_ddp.training import node
from kfp_ddp.training.__main__ import leave
from kfp_ddp.training.rank import run_and_report
from kfp_ddp.training.watch import Parent

RANK = "--rank"


def start(torchrun: Sequence[str], flags: Sequence[str]) -> int:
    """Download, run the ranks of this node, and upload; exit codes are as in a training."""
    adopt_secrets()
    request = parse(flags)
    if isinstance(request, PredictionRequest):
        with tempfile.TemporaryDirectory() as logs:
            output = request.output_dir or logs
            return _launch(torchrun, request.changed(output_dir=output), "computes what is missing")
    with (
        open_workspace(request.run_dir, "evaluate") as folder,
        with_local_folders(request, folder) as local,
    ):
        local = local.changed(output_dir=local.output_dir or str(local.target))
        code = _launch(torchrun, local, "restarts an evaluation from its beginning")
        if is_remote(request.run_dir) and not (local.target / FILE).exists():
            # Its logs could overwrite those of the first rank's node.
            shutil.rmtree(local.target, ignore_errors=True)
        return code


def _launch(torchrun: Sequence[str], request: RankRequest, retry: str) -> int:
    return node.launch(
        torchrun,
        ["kfp_ddp.evaluation.node", RANK, *request.to_argv()],
        Path(request.output_dir),
        check=lambda args: None,
        summary=lambda: f"another attempt {retry}",
    )


def rank(argv: Sequence[str]) -> int:
    """Do this rank's share of a request; exit codes are as in a training."""
    Parent()
    adopt_secrets()
    return run_and_report(lambda: parse(argv), _compute_with_others)


def _compute_with_others(request: EvaluationRequest | PredictionRequest) -> bool:
    """Join the other ranks and compute. Always complete: there are no checkpoints."""
    from kfp_ddp.evaluation.bulk_rank import predict_share
    from kfp_ddp.training import distributed

    with distributed.joined(request) as world:
        where = f"{socket.gethostname()}, {world.device}"
        log.info(f"rank {world.rank} of {world.size} on {where}")
        if isinstance(request, PredictionRequest):
            predict_share(request, world)
        else:
            evaluate_share(request, world)
        world.barrier()  # a rank that exits early would count as failed
    return True


if __name__ == "__main__":
    if sys.argv[1:2] == [RANK]:
        leave(rank(sys.argv[2:]))
    sys.exit(node.run_node(start))
