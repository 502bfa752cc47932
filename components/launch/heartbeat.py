"""The dead man's switch: the step touches a file, and node 0 of the job stops when it goes stale.

`python -m kfp_ddp.components.launch.heartbeat FILE MINUTES -- COMMAND…` runs COMMAND and sends
it SIGTERM, at which the ranks save a checkpoint and leave, when FILE was not touched for MINUTES.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

FILE = "launcher.heartbeat"
TOUCH_SECONDS = 20.0
LOOK_SECONDS = 5.0


def touch(run_dir: Path) -> None:
    """Say that the step is alive; a claim that cannot be written now is tried again."""
    try:
        (run_dir / FILE).touch()
    except OSError as error:
        print(f"warning: cannot touch {run_dir / FILE}: {error.strerror}", flush=True)


def guarded(command: list[str], run_dir: str, minutes: float) -> list[str]:
    """The command with the switch before it; unchanged when `minutes` is 0."""
    if not minutes:
        return command
    module = ["python3", "-m", "kfp_ddp.components.launch.heartbeat"]
    return [*module, f"{run_dir}/{FILE}", f"{minutes:g}", "--", *command]


def main(argv: Sequence[str]) -> int:
    """Run the command under the switch; returns its exit code.

    Only node 0 looks: ranks stop together when one of them is told to. Ages are measured by
    this node's clock, from the moment the file was seen to change.
    """
    path, minutes, _, *command = argv
    started: list[subprocess.Popen[bytes]] = []

    def forward(number: int, frame: FrameType | None) -> None:
        for each in started:
            each.send_signal(number)
        if not started:
            sys.exit(128 + number)

    # The kernel drops a signal to PID 1 that has no handler, so the handlers come first.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, forward)
    started.append(process := subprocess.Popen(command))
    if os.environ.get("PET_NODE_RANK", "0") != "0":
        return _code(process.wait())
    seen, at = _changed(Path(path)), time.monotonic()
    while True:
        try:
            return _code(process.wait(timeout=LOOK_SECONDS))
        except subprocess.TimeoutExpired:
            pass
        now = _changed(Path(path))
        if now != seen:
            seen, at = now, time.monotonic()
        elif time.monotonic() - at > float(minutes) * 60:
            print(f"the launching step gave no sign of life for {minutes} minutes: stopping")
            sys.stdout.flush()
            process.terminate()
            return _code(process.wait())


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _code(returncode: int) -> int:
    """As a shell says it: 128 and the signal for a process that a signal ended."""
    return returncode if returncode >= 0 else 128 - returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
