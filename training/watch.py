"""Signals between a launcher and its ranks, through environment variables and process ids.

Ranks must not outlive their launcher: they watch its process id.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from kfp_ddp.core.errors import PREEMPTED

PARENT = "KFP_DDP_PARENT_PID"
LAUNCH = "KFP_DDP_LAUNCH_ID"
"""Id of one start of the launcher; ranks that it restarts have the same."""
RESTARTS = "KFP_DDP_RESTARTS"
"""Set if the launcher restarts ranks that ended."""
FINAL = signal.SIGUSR1
"""Signal to the launcher: a restart of the ranks would fail the same way."""
ELASTIC = "KFP_DDP_ELASTIC"
"""Set if nodes may join and leave, so that ranks may get unequal shares of a batch."""
_INTERVAL_S = 0.5
_GRACE_S = 60.0


def end_for_good() -> None:
    """Prevent the launcher from restarting the ranks."""
    if RESTARTS in os.environ and os.environ.get(PARENT) == str(os.getppid()):
        os.kill(os.getppid(), FINAL)


class Parent:
    """Watches the process id in $KFP_DDP_PARENT_PID, if it is set.

    Polling works on every POSIX system and, unlike prctl's death signal, does not fire when the
    thread that started us ends.
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
        os._exit(PREEMPTED)


class Heartbeat:
    """Calls `on_stale` once when a file has not changed for `seconds`.

    Time is measured by the clock of this process, so a wrong clock of the machine that touches the
    file does no harm. A missing file counts as unchanged.
    """

    def __init__(self, path: Path, seconds: float, on_stale: Callable[[], None]) -> None:
        self._path, self._seconds, self._on_stale = path, seconds, on_stale
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        seen, since = self._stamp(), time.monotonic()
        while time.monotonic() - since < self._seconds:
            time.sleep(min(1.0, self._seconds / 4))
            stamp = self._stamp()
            if stamp != seen:
                seen, since = stamp, time.monotonic()
        self._on_stale()

    def _stamp(self) -> tuple[int, int]:
        try:
            about = self._path.stat()
        except OSError:
            return 0, 0
        return about.st_mtime_ns, about.st_size
