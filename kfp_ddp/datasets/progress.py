"""A live line while a sync runs: a bar on a terminal, a line each ten seconds in a log."""

import sys
import threading
import time
from typing import TextIO

from kfp_ddp.datasets.meter import Meter
from kfp_ddp.datasets.text import human

_BAR = 24
_CLEAR = "\r\033[K"


class Progress:
    """Prints what a sync's `watch` tells it, until the block ends."""

    def __init__(self, stream: TextIO | None = None, quiet: bool = False) -> None:
        self._stream = stream or sys.stderr
        self._quiet = quiet
        self._live = self._stream.isatty() and not quiet
        self._every = 0.2 if self._live else 10.0
        self._meter: Meter | None = None
        self._files = self._bytes = 0
        self._began = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)

    def __enter__(self) -> "Progress":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._live:
            self._stream.write(_CLEAR)
            self._stream.flush()

    def watch(self, phase: str, meter: Meter | None, files: int, size: int) -> None:
        """A phase starts; while downloading, the meter tells how far it is."""
        self._files, self._bytes, self._meter = files, size, meter
        self._began = time.monotonic()
        if meter is None:
            self._write(phase)
        elif files:
            self._write(f"{phase} {files:,} files, {human(size)}")

    def _loop(self) -> None:
        while not self._stop.wait(self._every):
            if self._meter is not None and self._files:
                self._write(self.line(self._meter))

    def line(self, meter: Meter) -> str:
        """How far, how fast, how long still."""
        seconds = max(time.monotonic() - self._began, 1e-3)
        # Files tell more than bytes when a body is brought twice, bytes when a file is large.
        share = max(meter.files / self._files, meter.bytes / max(self._bytes, 1))
        share = min(share, 1.0 if meter.files == self._files else 0.99)
        full = int(share * _BAR)
        rate = meter.bytes / seconds
        left = seconds / share - seconds if share > 0 else 0.0
        retries = f", {meter.retries} retries" if meter.retries else ""
        return (
            f"{'█' * full}{'░' * (_BAR - full)} {share:4.0%}  {meter.files:,}/{self._files:,} files"
            f"  {human(meter.bytes)}  {human(rate)}/s  {left:.0f} s left{retries}"
        )

    def _write(self, text: str) -> None:
        if self._quiet:
            return
        self._stream.write(f"{_CLEAR}{text}" if self._live else f"{text}\n")
        self._stream.flush()
