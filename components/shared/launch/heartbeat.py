"""The dead man's switch: the step touches a file, and rank 0 stops the job when it goes stale.

The other end is `stop_when_stale` of `kfp_ddp.training.config.TrainConfig`: the ranks save a
checkpoint and leave.
"""

from pathlib import Path

FILE = "launcher.heartbeat"
TOUCH_SECONDS = 10.0


def touch(run_dir: Path) -> None:
    """Say that the step is alive; a claim that cannot be written now is tried again."""
    try:
        (run_dir / FILE).touch()
    except OSError as error:
        print(f"warning: cannot touch {run_dir / FILE}: {error.strerror}", flush=True)
