"""`python -m kfp_ddp.evaluation.bulk.node [torchrun flags] -- FLAGS`: the ranks of a node.

With `--rank FLAGS` it is one of these ranks.
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kfp_ddp.core.step import adopt_secrets
from kfp_ddp.evaluation.bulk.rank import predict_share
from kfp_ddp.evaluation.bulk.request import PredictionRequest
from kfp_ddp.evaluation.node import RANK, rank
from kfp_ddp.jobs.local import PREDICTION
from kfp_ddp.training import node
from kfp_ddp.training.__main__ import leave


def predict(torchrun: Sequence[str], flags: Sequence[str]) -> int:
    """Run the ranks of this node; exit codes are as in a training."""
    adopt_secrets()
    request = PredictionRequest.parse(flags)
    with tempfile.TemporaryDirectory() as folder:
        request = request.changed(output_dir=request.output_dir or folder)
        return node.launch(
            torchrun,
            [PREDICTION, RANK, *request.to_argv()],
            Path(request.output_dir),
            check=lambda args: None,
            summary=lambda: "another attempt computes what is missing",
        )


if __name__ == "__main__":
    if sys.argv[1:2] == [RANK]:
        leave(rank(sys.argv[2:], PredictionRequest.parse, predict_share))
    sys.exit(node.run_node(predict))
