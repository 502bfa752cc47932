"""Progress of each rank, in a file that it rewrites periodically: a rank that hangs is visible."""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, Literal

from kfp_ddp.core.files import atomic_write

NODE = "KFP_DDP_NODE"
"""Variable with the name of the pod's node."""

Phase = Literal["start", "data", "step", "evaluate", "save"]


class Progress:
    """Writes `<folder>/<rank>.json` from a thread during the context; errors are ignored.

    The loop sets `step`, the number of completed steps, and `phase`.
    """

    EVERY_S: ClassVar[float] = 10.0

    def __init__(self, folder: Path, rank: int) -> None:
        self.look: Callable[[], None] = lambda: None
        """Called periodically, from the thread."""
        self.began = time.perf_counter()
        self.step = 0
        self.phase: Phase = "start"
        self._path, self._rank = folder / f"{rank}.json", rank
        self._last, self._step_seconds = (time.monotonic(), 0), 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._write, name="progress", daemon=True)

    def __enter__(self) -> "Progress":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _write(self) -> None:
        """Write at the start, each `EVERY_S`, and at the end."""
        while True:
            done = self._done.is_set()
            with contextlib.suppress(OSError):  # reported when a checkpoint is saved
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with atomic_write(self._path, self._path.with_name(f".{self._rank}.tmp")) as file:
                    file.write(json.dumps(self._now()).encode())
            if done:
                return
            with contextlib.suppress(OSError):
                self.look()
            self._done.wait(self.EVERY_S)

    def _now(self) -> dict[str, object]:
        (since, before), step, now = self._last, self.step, time.monotonic()
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
