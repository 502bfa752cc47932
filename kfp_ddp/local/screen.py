"""Display of a running pipeline: a line per step, with progress on a terminal."""

import shutil
import sys
import time
from typing import Self, TextIO

CLEAR_LINE = "\r\x1b[2K"
DETAIL_WIDTH = 66
REST_WIDTH = 30  # mark, name and seconds of a line, which must not wrap


class Phase:
    """Context manager that prints `✓ name  detail  seconds` at its end, or `✗` after an error.

    On a terminal the line is also drawn while the phase runs.
    """

    def __init__(self, name: str, stream: TextIO | None = None) -> None:
        self.name = name
        self.detail = ""
        self._stream = stream or sys.stdout
        self._live = self._stream.isatty()
        self._started = time.monotonic()

    def show(self, detail: str) -> None:
        """Replace the detail of the line."""
        self.detail = detail
        if self._live:
            self._stream.write(CLEAR_LINE + self._line("…"))
            self._stream.flush()

    def end(self, good: bool) -> None:
        """Write the phase's last line."""
        mark = "✓" if good else "✗"
        self._stream.write((CLEAR_LINE if self._live else "") + self._line(mark) + "\n")
        self._stream.flush()

    def __enter__(self) -> Self:
        self.show("")
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.end(good=error is None)

    def _line(self, mark: str) -> str:
        seconds = time.monotonic() - self._started
        columns = shutil.get_terminal_size().columns if self._live else sys.maxsize
        room = min(DETAIL_WIDTH, columns - REST_WIDTH)
        return f"  {mark} {self.name:<15} {self.detail:<{room}.{room}} {seconds:5.1f} s"


def bar(done: int, total: int, width: int = 20) -> str:
    """Return a bar such as `██████░░░░` for `done` of `total`."""
    filled = width * min(done, total) // max(total, 1)
    return "█" * filled + "░" * (width - filled)
