"""`python -m kfp_ddp.training.netcheck [torchrun flags] -- SETTINGS`: the ranks of a node."""

import json
import sys
import tempfile
from pathlib import Path

from kfp_ddp.training.node import launch, run_node


def measure(torchrun: list[str], flags: list[str]) -> int:
    """Launch, wait, and return 0 or the exit code of the first failure."""
    (settings,) = flags
    with tempfile.TemporaryDirectory(prefix="netcheck-") as folder:
        arguments = json.dumps({**json.loads(settings), "output_dir": folder})
        return launch(
            torchrun,
            ["kfp_ddp.training.netcheck.rank", arguments],
            Path(folder),
            check=lambda _: None,
            summary=lambda: "",
        )


if __name__ == "__main__":
    sys.exit(run_node(measure))
