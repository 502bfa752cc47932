"""The ranks of a script: [torchrun flags] -- --output-dir FOLDER FILE ARGUMENTS; or one, --rank."""

import sys
from collections.abc import Sequence
from pathlib import Path

from kfp_ddp.training import node
from kfp_ddp.training.__main__ import leave
from kfp_ddp.training.own_script import call
from kfp_ddp.training.rank import run_and_report
from kfp_ddp.training.spec.config import TrainConfig
from kfp_ddp.training.watch import Parent

RANK = "--rank"


def run(torchrun: Sequence[str], flags: Sequence[str]) -> int:
    """Run the ranks; exit codes are as in a training."""
    _, folder, *program = flags
    return node.launch(
        torchrun,
        ["kfp_ddp.jobs.shipping.script_node", RANK, *program],
        Path(folder),
        check=lambda args: None,
        summary=lambda: "a script resumes from its own checkpoints",
    )


def rank(program: Sequence[str]) -> int:
    """Run one rank; exit codes are as in a training."""
    Parent()
    return run_and_report(
        lambda: TrainConfig(data="", output_dir=str(Path(program[0]).parent)),
        lambda _: call(program[0], program[1:]),
    )


if __name__ == "__main__":
    if sys.argv[1:2] == [RANK]:
        leave(rank(sys.argv[2:]))
    sys.exit(node.run_node(run))
