"""What stands above a step in its pod: Argo's emissary as PID 1, and KFP's launcher.

A SIGTERM goes to the step's process group. The launcher dies of it at once, and the emissary
then ends the container, with SIGKILL for whatever is left: 30 to 720 ms later, as measured.
`STEP_GRACE` is that time in seconds.
"""

import os
import signal
import subprocess
import sys
import time
from types import FrameType

# PID 1 must be able to answer a signal at any moment, so the handler stands before the child.
_children: list[subprocess.Popen[bytes]] = []


def _end(number: int, frame: FrameType | None) -> None:
    for child in _children:
        os.killpg(child.pid, number)
    time.sleep(float(os.environ.get("STEP_GRACE", "0.2")))
    os._exit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)
    _children.append(subprocess.Popen(sys.argv[1:], process_group=0))
    sys.exit(1 if _children[0].wait() else 0)
