"""A process that must not outlive its parent notices that the parent is gone."""

import os
import threading
import time
from collections.abc import Callable

PARENT = "KFP_DDP_PARENT_PID"
_INTERVAL_S = 0.5
_GRACE_S = 60.0


class Parent:
    """Watches the process id in $KFP_DDP_PARENT_PID; without it there is nothing to watch.

    Polling the parent's id works on every POSIX system and, unlike prctl's death signal, does not
    fire when the thread that started us ends.
    """

    def __init__(self) -> None:
        self.on_gone: Callable[[], None] | None = None
        expected = os.environ.get(PARENT)
        if expected:
            threading.Thread(target=self._watch, args=(int(expected),), daemon=True).start()

    def _watch(self, expected: int) -> None:
        while os.getppid() == expected:
            time.sleep(_INTERVAL_S)
        if self.on_gone is not None:
            self.on_gone()
            time.sleep(_GRACE_S)
        os._exit(143)
