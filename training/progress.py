"""How far each rank is, in a file that it replaces while it lives: one that is stopped shows."""

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
"""Names the node of the cluster that the pod runs on."""

Phase = Literal["start", "data", "step", "evaluate", "save"]


class Progress:
    """Writes `<folder>/<rank>.json` from a thread, while the context lasts; failing costs nothing.

    `step` counts the steps that are done, `phase` tells what the rank does now; the loop sets both.
    """

    EVERY_S: ClassVar[float] = 10.0

    def __init__(self, folder: Path, rank: int) -> None:
        self.look: Callable[[], None] = lambda: None
        """Called each time, from the thread."""
        self.began = time.perf_counter()
        self.step = 0
        self.phase: Phase = "start"
        self._path, self._rank = folder / f"{rank}.json", rank
        self._told, self._step_seconds = (time.monotonic(), 0), 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._write, name="progress", daemon=True)

    def __enter__(self) -> "Progress":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _write(self) -> None:
        """At once, each `EVERY_S`, and at the end."""
        while True:
            over = self._over.is_set()
            with contextlib.suppress(OSError):  # said better where a checkpoint is saved
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with atomic_write(self._path, self._path.with_name(f".{self._rank}.tmp")) as file:
                    file.write(json.dumps(self._now()).encode())
            if over:
                return
            with contextlib.suppress(OSError):
                self.look()
            self._over.wait(self.EVERY_S)

    def _now(self) -> dict[str, object]:
        (since, before), step, now = self._told, self.step, time.monotonic()
        if step > before:
            self._step_seconds = (now - since) / (step - before)
            self._told = now, step
        return {
            "rank": self._rank,
            "pod": socket.gethostname(),
            "node": os.environ.get(NODE, ""),
            "step": step,
            "phase": self.phase,
            "step_seconds": self._step_seconds,
            "time": time.time(),
        }


def forget_others(folder: Path, ranks: int) -> None:
    """Remove what ranks wrote that an earlier start had and this one, of `ranks`, has not."""
    with contextlib.suppress(OSError):
        for path in folder.glob("*.json"):
            if not path.stem.isdecimal() or int(path.stem) >= ranks:
                path.unlink(missing_ok=True)
