"""`python -m kfp_ddp.training`: one rank, alone or under torchrun."""

import atexit
import contextlib
import os
import sys
import threading
import traceback
from typing import NoReturn

from kfp_ddp.training.rank import main


def leave(code: int) -> NoReturn:
    """Exit without a shutdown, in which a thread of torch sometimes calls std::terminate."""
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()  # such as a save
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # files on a volume that may be full
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    try:
        code = main()
    except Exception:  # noqa: BLE001  NCCL threads may hang during a shutdown
        traceback.print_exc()
        code = 1
    leave(code)
