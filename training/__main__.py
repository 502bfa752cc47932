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
    """End the process without taking the interpreter down.

    A thread of torch's that is still there then calls std::terminate at times, and a run that
    was done would end as killed by SIGABRT. What Python does at its end is done here first.
    """
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()  # a save that was begun
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # files on a volume that may be full
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    try:
        code = main()
    except Exception:  # noqa: BLE001  threads of NCCL's may hang while Python goes down
        traceback.print_exc()
        code = 1
    leave(code)
