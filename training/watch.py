"""Liveness: ranks watch their launcher's process id, and write their progress to files."""

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, Literal

from kfp_ddp.core.errors import PREEMPTED
from kfp_ddp.core.files import atomic_write

PARENT = "KFP_DDP_PARENT_PID"
LAUNCH = "KFP_DDP_LAUNCH_ID"
"""Id of one start of the launcher; ranks that it restarts have the same."""
RESTARTS = "KFP_DDP_RESTARTS"
"""Set if the launcher restarts ranks that ended."""
FINAL = signal.SIGUSR1
"""Signal to the launcher: a restart of the ranks would fail the same way."""
NODE = "KFP_DDP_NODE"
"""Name of the pod's node."""
Stage = Literal["start", "data", "step", "evaluate", "save"]
_INTERVAL_SECONDS = 0.5
_GRACE_S = 60.0


def end_for_good() -> None:
    """Prevent the launcher from restarting the ranks."""
    if RESTARTS in os.environ and os.environ.get(PARENT) == str(os.getppid()):
        os.kill(os.getppid(), FINAL)


class Parent:
    """Polls for the parent in $KFP_DDP_PARENT_PID: prctl would fire when its thread ends."""

    def __init__(self) -> None:
        self.on_gone: Callable[[], None] | None = None
        expected = os.environ.get(PARENT)
        if expected:
            threading.Thread(target=self._watch, args=(int(expected),), daemon=True).start()

    def _watch(self, expected: int) -> None:
        while os.getppid() == expected:
            time.sleep(_INTERVAL_SECONDS)
        if self.on_gone is not None:
            self.on_gone()
            time.sleep(_GRACE_S)
        os._exit(PREEMPTED)


class Heartbeat:
    """Calls `on_stale` once when a file is missing or unchanged for `seconds` by our clock."""

    def __init__(self, path: Path, seconds: float, on_stale: Callable[[], None]) -> None:
        self._path = path
        self._seconds = seconds
        self._on_stale = on_stale
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        seen = self._stamp()
        since = time.monotonic()
        while time.monotonic() - since < self._seconds:
            time.sleep(min(1.0, self._seconds / 4))
            stamp = self._stamp()
            if stamp != seen:
                seen = stamp
                since = time.monotonic()
        self._on_stale()

    def _stamp(self) -> tuple[int, int]:
        try:
            about = self._path.stat()
        except OSError:
            return 0, 0
        return about.st_mtime_ns, about.st_size


class Progress:
    """Writes `<folder>/<rank>.json` from a thread; the loop sets `step` and `phase`."""

    INTERVAL_SECONDS: ClassVar[float] = 10.0

    def __init__(self, folder: Path, rank: int) -> None:
        self.began = time.perf_counter()
        self.step = 0
        self.phase: Stage = "start"
        self._path = folder / f"{rank}.json"
        self._rank = rank
        self._last = (time.monotonic(), 0)
        self._step_seconds = 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._write, name="progress", daemon=True)

    def __enter__(self) -> "Progress":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _write(self) -> None:
        """Write at the start, each `INTERVAL_SECONDS`, and at the end."""
        while True:
            done = self._done.is_set()
            with contextlib.suppress(OSError):  # reported when a checkpoint is saved
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with atomic_write(self._path, self._path.with_name(f".{self._rank}.tmp")) as file:
                    file.write(json.dumps(self._now()).encode())
            if done:
                return
            self._done.wait(self.INTERVAL_SECONDS)

    def _now(self) -> dict[str, object]:
        since, before = self._last
        step = self.step  # the loop may change it meanwhile
        now = time.monotonic()
        if step > before:
            self._step_seconds = (now - since) / (step - before)
            self._last = now, step
        return {
            "rank": self._rank,
            "pod": socket.gethostname(),
            "node": os.environ.get(NODE, ""),
            "step": step,
            "phase": self.phase,
            "step_seconds": self._step_seconds,
            "time": time.time(),
        }


def remove_stale(folder: Path, ranks: int) -> None:
    """Remove files of ranks of an earlier start with more than `ranks` ranks."""
    with contextlib.suppress(OSError):
        for path in folder.glob("*.json"):
            if not path.stem.isdecimal() or int(path.stem) >= ranks:
                path.unlink(missing_ok=True)
