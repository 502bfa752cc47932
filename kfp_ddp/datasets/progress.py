"""Progress of a sync: counters, a bandwidth limit, and a live line.

The line is a bar on a terminal and one line each ten seconds in a log.
"""

import sys
import threading
import time
from dataclasses import dataclass
from typing import TextIO

from kfp_ddp.core.text import human

_BAR = 24
_CLEAR = "\r\033[K"


@dataclass
class Meter:
    """Files and bytes that have arrived, and attempts that failed; one thread writes them."""

    files: int = 0
    bytes: int = 0
    retries: int = 0


class Throttle:
    """A bandwidth limit in bytes a second over all connections; 0 for none."""

    def __init__(self, rate: float) -> None:
        self.rate, self._free_at = rate, 0.0

    def delay(self, count: int) -> float:
        """Count `count` bytes and return the seconds to wait before they may pass."""
        if not self.rate:
            return 0
        now = time.monotonic()
        self._free_at = max(self._free_at, now) + count / self.rate
        return self._free_at - now


class Progress:
    """Prints the phases of a sync and its progress until the block ends."""

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
        """Start a phase; a download has a meter."""
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
        """Return a line with progress, rate and remaining time."""
        seconds = max(time.monotonic() - self._began, 1e-3)
        # Retried bodies count twice in bytes, and large files hardly count in files.
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
