"""Display of a running pipeline: a line per step, with progress on a terminal."""

import shutil
import sys
import textwrap
import time
from typing import TextIO

import click

from kfp_ddp.jobs.progress import clock

CLEAR_LINE = "\r\x1b[2K"
DETAIL_WIDTH = 66
REST_WIDTH = 29  # mark, name and seconds of a line, which must not wrap
INDENT = 20  # of the detail
LOG_SECONDS = 60.0
"""Interval of the lines about a running phase that a pipe or file gets."""


class Phase:
    """A line `✓ name  detail  seconds`, or with `✗` for an error.

    While the phase runs, it is also drawn on a terminal, and added to a pipe once a minute.
    """

    def __init__(self, name: str, stream: TextIO | None = None) -> None:
        self.name = name
        self.detail = ""
        self._stream = stream or sys.stdout
        self._live = self._stream.isatty()
        self._started = self._printed = time.monotonic()

    @property
    def width(self) -> int:
        """Width of the detail."""
        columns = shutil.get_terminal_size().columns if self._live else sys.maxsize
        return max(10, min(DETAIL_WIDTH, columns - REST_WIDTH))

    def show(self, detail: str) -> None:
        """Replace the detail of the line."""
        self.detail = detail
        if self._live:
            short = textwrap.shorten(detail, self.width, placeholder=" …")
            self._write(CLEAR_LINE + self._line("…", short))
        elif time.monotonic() - self._printed >= LOG_SECONDS:
            self._printed = time.monotonic()
            self._write(self._line("…", detail) + "\n")

    def end(self, good: bool) -> None:
        """Write the phase's last line; a detail that is too long goes on in the next one."""
        wrapped = textwrap.wrap(self.detail, self.width, break_on_hyphens=False)
        first, *others = wrapped if self._live and wrapped else [self.detail]
        line = self._line("✓" if good else "✗", first)
        rest = "".join(f"{' ' * INDENT}{one}\n" for one in others)
        self._write(f"{CLEAR_LINE if self._live else ''}{line}\n{rest}")

    def _line(self, mark: str, detail: str) -> str:
        seconds = time.monotonic() - self._started
        duration = f"{seconds:5.1f} s" if seconds < 1000 else f"{clock(seconds):>7}"
        return f"  {mark} {self.name:<15} {detail:<{self.width}} {duration}"

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def say(text: str) -> None:
    """Print a line; a terminal gets it wrapped between words."""
    if sys.stdout.isatty():
        columns = shutil.get_terminal_size().columns
        text = textwrap.fill(text, columns - 1, subsequent_indent="  ", break_on_hyphens=False)
    click.echo(text)
