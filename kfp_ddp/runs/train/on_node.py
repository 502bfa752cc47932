"""`python -m kfp_ddp.runs.train.on_node [torchrun flags] -- [training flags]`: a worker.

A worker without a PVC for its data or its work: the dataset is downloaded first, then
`kfp_ddp.training.node` trains in folders of this pod, whose files are uploaded to a bucket.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

from kfp_ddp.core.errors import PREEMPTED, InputError, KfpDdpError
from kfp_ddp.core.failure import Failure, report
from kfp_ddp.core.folders import is_per_node
from kfp_ddp.core.run_folder import RunFolder
from kfp_ddp.core.step import adopt_secrets
from kfp_ddp.datasets.access import local_dataset, using
from kfp_ddp.models import initial_weights
from kfp_ddp.runs.training_folder import training_folder
from kfp_ddp.training.config import TrainConfig
from kfp_ddp.training.flags import parse
from kfp_ddp.training.watch import PARENT

NODE = "kfp_ddp.training.node"
MEETING_SECONDS = 4 * 3600
"""How long nodes wait for one another when each downloads the dataset."""


class _Stopped(Exception):  # noqa: N818 (it is a state, and is always handled)
    """A signal before the start of the training."""


class TrainingProcess:
    """The training process; signals are forwarded to it."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._forward)

    def run(self, command: list[str]) -> int:
        """Run the command and return its exit code."""
        self.process = subprocess.Popen(command, env={**os.environ, PARENT: str(os.getpid())})
        code = self.process.wait()
        return 128 - code if code < 0 else code

    def _forward(self, number: int, frame: FrameType | None) -> None:
        if self.process is None:
            raise _Stopped
        if self.process.poll() is None:
            self.process.send_signal(number)


def main() -> int:
    """Download, train and upload; return, or exit with, the code of `kfp_ddp.training.node`."""
    adopt_secrets()
    at = sys.argv.index("--") if "--" in sys.argv else 0
    try:
        config = parse(sys.argv[at + 1 :], prog=f"python -m {NODE} --")
        return _train(TrainingProcess(), config, sys.argv[1:at])
    except _Stopped:
        return report(Failure(PREEMPTED, -1, "stopped before the training started", True), None)
    except KfpDdpError as error:
        retryable = error.retryable or not isinstance(error, InputError)
        return report(Failure(error.exit_code, -1, str(error), retryable), None)


def _train(node: TrainingProcess, config: TrainConfig, torchrun: list[str]) -> int:
    """Train by a configuration that may have URIs as folders; return 0 or PREEMPTED."""
    run_id = config.run_id.partition("/")[0]
    if is_per_node(config.data):
        limits = f"timeout={MEETING_SECONDS},join_timeout={MEETING_SECONDS}"
        os.environ.setdefault("PET_RDZV_CONF", limits)
    with (
        training_folder(config) as run_dir,
        local_dataset(config.data, run_dir, run_id) as data,
        using(run_id or "train", config.output_dir, data),
    ):
        local = with_local_folders(config, data, run_dir)
        code = node.run([sys.executable, "-m", NODE, *torchrun, "--", *local.to_argv()])
        if code not in (0, PREEMPTED):  # after a failure the upload has less time
            raise SystemExit(code)
        return code


def with_local_folders(config: TrainConfig, data: Path, run_dir: Path) -> TrainConfig:
    """Return the configuration with the local folders."""
    folders = {"data": str(data), "output_dir": str(run_dir)}
    if config.stop_when_stale:
        folders["stop_when_stale"] = str(RunFolder(run_dir).heartbeat)
    return with_local_weights(TrainConfig.create(**{**config.explicit(), **folders}), run_dir)


def with_local_weights(config: TrainConfig, run_dir: Path) -> TrainConfig:
    """Return the configuration with local initial weights, downloaded to the run's folder."""
    if not initial_weights.is_per_node(config.pretrained):
        return config
    weights = initial_weights.download(config.pretrained, RunFolder(run_dir).initial_weights)
    return TrainConfig.create(**{**config.explicit(), "pretrained": str(weights)})


if __name__ == "__main__":
    sys.exit(main())
