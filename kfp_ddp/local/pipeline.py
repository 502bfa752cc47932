"""The child process of a local run: a compiled pipeline through kfp.local, with its log on stdout.

Prerequisite: the `local` extra. `python -m kfp_ddp.local.pipeline ARGUMENTS_JSON ROOT YAML SEED`.
"""

import json
import os
import random
import shutil
import signal
import sys
import warnings
from contextlib import suppress

import psutil

from kfp_ddp.training.watch import PARENT, Parent

TEMPORARY = "KFP_DDP_TEMPORARY"
"""Environment variable with the folder of temporary files, which a killed command cannot delete."""
GRACE_SECONDS = 30.0
"""Time for the ranks to end a step and save a checkpoint."""


def run(arguments: dict[str, object], pipeline_root: str, compiled: str, seed: str) -> None:
    """Run a pipeline in subprocesses; equal seeds give equal ids. RuntimeError if it fails."""
    import yaml
    from kfp import components, local

    from kfp_ddp.local import loops

    loops.correct()
    vars(yaml)["SafeLoader"] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times faster
    # The steps run in this Python, with any image and without a cluster.
    warnings.filterwarnings("ignore", message="You may be attemping", category=RuntimeWarning)
    warnings.filterwarnings("ignore", message=r"Task '.*': settings .* have no effect")
    # kfp would create a folder in /tmp for each run, and never remove it.
    workspace = f"{pipeline_root}/.workspace"
    local.init(local.SubprocessRunner(use_venv=False), pipeline_root, workspace)
    pipeline = components.load_component_from_file(compiled)
    random.seed(seed)
    pipeline(**arguments)


def end_tree(root: psutil.Process, itself: bool = True) -> None:
    """End a process and all its descendants: SIGTERM, `GRACE_SECONDS` to save, then SIGKILL.

    An interrupt during the wait sends SIGKILL at once.
    """
    tree = [*root.children(recursive=True), *([root] if itself else [])]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in tree:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        with suppress(KeyboardInterrupt):
            _, tree = psutil.wait_procs(tree, timeout=GRACE_SECONDS)


def _end() -> None:
    end_tree(psutil.Process(), itself=False)
    if temporary := os.environ.get(TEMPORARY):
        shutil.rmtree(temporary, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    Parent().on_gone = _end
    os.environ.pop(PARENT, None)  # the steps have another parent
    run(json.loads(sys.argv[1]), *sys.argv[2:])
