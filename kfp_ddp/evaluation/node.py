"""`python -m kfp_ddp.evaluation.node [torchrun flags] -- FLAGS`: the ranks of a node.

Downloads what is not local first: a dataset that is not on a PVC, and a checkpoint in a bucket. The
node of the first rank uploads the evaluation.
"""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from kfp_ddp.core.errors import KfpDdpError
from kfp_ddp.core.folders import is_remote
from kfp_ddp.core.step import adopt_secrets
from kfp_ddp.datasets.access import local_dataset, using
from kfp_ddp.evaluation.request import Request
from kfp_ddp.models.evaluation import FILE
from kfp_ddp.runs.workspace import open_workspace
from kfp_ddp.training import node

RANK = "kfp_ddp.evaluation.rank"


def main(argv: Sequence[str] | None = None) -> int:
    """Download inputs, evaluate and upload results. Exit codes are as in a training."""
    node.end_with_parent()
    adopt_secrets()
    torchrun, flags = node.split_flags(sys.argv[1:] if argv is None else argv)
    try:
        return evaluate(torchrun, Request.parse(flags))
    except KfpDdpError as error:
        return node.report_known(error, None)


def evaluate(torchrun: Sequence[str], request: Request) -> int:
    """Run the ranks of this node and return their exit code."""
    remote = is_remote(request.run_dir)
    with (
        open_workspace(request.run_dir, "evaluate") as folder,
        local_dataset(request.data, folder.path) as data,
        using("evaluate", request.run_dir, data),
    ):
        checkpoint = request.checkpoint
        if request.of_run:
            checkpoint = str(folder.download(checkpoint))
        paths = {"checkpoint": checkpoint, "run_dir": str(folder.path), "data": str(data)}
        request = Request.create(**{**request.given(), **paths})
        if not request.output_dir:
            request = Request.create(**{**request.given(), "output_dir": str(request.target)})
        code = node.launch(
            torchrun,
            [RANK, *request.to_argv()],
            Path(request.output_dir),
            check=lambda args: None,
            summary=lambda: "an evaluation restarts from its beginning",
        )
        if remote and not (request.target / FILE).exists():
            # Its logs could overwrite those of the first rank's node.
            shutil.rmtree(request.target, ignore_errors=True)
        return code


if __name__ == "__main__":
    sys.exit(main())
