"""The `teardown` step: end the processes that a run left on this machine."""

from pathlib import Path

from kfp_ddp.components.launch import processes
from kfp_ddp.components.launch.local import GRACE_SECONDS


def run(run_id: str, work_dir: str) -> str:
    """End what the run left and say so in one line; never raises for nothing to do."""
    said = _processes(Path(work_dir) / run_id)
    print(said, flush=True)
    return said


def _processes(run_dir: Path) -> str:
    pid = processes.recorded(run_dir)
    if pid is None:
        return "nothing was left to end"
    processes.end(pid, GRACE_SECONDS)
    processes.forget(run_dir)
    return f"ended process group {pid}"
