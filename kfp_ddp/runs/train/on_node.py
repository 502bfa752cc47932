"""`python -m kfp_ddp.runs.train.on_node [torchrun flags] -- [training flags]`: a worker.

A worker without a PVC for its data or its work: it trains as `kfp_ddp.training.node` does, in
folders of this pod. The dataset is downloaded before, and the files are uploaded to a bucket.
"""

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from kfp_ddp.core.errors import PREEMPTED
from kfp_ddp.core.folders import is_per_node
from kfp_ddp.core.step import adopt_secrets
from kfp_ddp.datasets.access import using
from kfp_ddp.runs.training_folder import with_local_folders
from kfp_ddp.training import node
from kfp_ddp.training.spec.config import parse

MEETING_SECONDS = 4 * 3600
"""How long nodes wait for one another when each downloads the dataset."""


def train(torchrun: Sequence[str], flags: Sequence[str]) -> int:
    """Download, train and upload; return, or exit with, the code of `kfp_ddp.training.node`."""
    adopt_secrets()
    config = parse(flags, prog=node.PROGRAM)
    if is_per_node(config.data):
        limits = f"timeout={MEETING_SECONDS},join_timeout={MEETING_SECONDS}"
        os.environ.setdefault("PET_RDZV_CONF", limits)
    holder = config.run_id.partition("/")[0] or "train"
    with ExitStack() as stack:
        local = stack.enter_context(with_local_folders(config))
        stack.enter_context(using(holder, config.output_dir, local.data))
        code = node.train(torchrun, local, finish=stack.close)
        if code not in (0, PREEMPTED):  # after a failure the upload has less time
            raise SystemExit(code)
        return code


if __name__ == "__main__":
    sys.exit(node.run_node(train))
