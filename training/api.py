"""Start a run from another program, without importing torch into it."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from kfp_ddp.training.config import TrainConfig
from kfp_ddp.training.launch import Failure
from kfp_ddp.training.watch import PARENT


def launch(config: TrainConfig, nproc_per_node: int, log_dir: Path | None = None) -> int:
    """Train on `nproc_per_node` ranks of this machine and wait; returns the exit code.

    0 done, 143 preempted, 2 input that cannot be used, otherwise the first failing rank's own; then
    `read_failure` tells more. The ranks' logs go to `log_dir` (default `<output_dir>/logs`) and to
    this process's output. SIGTERM and Ctrl-C are passed on; if this process dies, the ranks save
    and stop too.
    """
    folder = log_dir or default_log_dir(config)
    (folder / "failure.json").unlink(missing_ok=True)
    command = [
        *(sys.executable, "-m", "kfp_ddp.training.launch"),
        *("--nproc-per-node", str(nproc_per_node), "--log-dir", str(folder)),
        *("--", *config.to_argv()),
    ]
    child = subprocess.Popen(command, env={**os.environ, PARENT: str(os.getpid())})
    previous: Any = None
    main_thread = threading.current_thread() is threading.main_thread()

    def pass_on(number: int, frame: FrameType | None) -> None:
        child.send_signal(number)

    if main_thread:
        previous = signal.signal(signal.SIGTERM, pass_on)
    try:
        return child.wait()
    except KeyboardInterrupt:
        child.send_signal(signal.SIGTERM)
        child.wait()
        raise
    finally:
        if main_thread:
            signal.signal(signal.SIGTERM, previous)


def read_failure(config: TrainConfig, log_dir: Path | None = None) -> Failure | None:
    """The root cause of a launch that did not return 0: rank, error in one line, exit code.

    None if the launcher wrote none: it ended with 0 or was killed itself.
    """
    path = (log_dir or default_log_dir(config)) / "failure.json"
    try:
        return Failure(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def default_log_dir(config: TrainConfig) -> Path:
    """Where a run's logs lie unless told otherwise."""
    return Path(config.output_dir) / "logs"
