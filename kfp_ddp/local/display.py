"""Display of a local run: a line for each step, its progress, and notes."""

import os
import shlex
import shutil
import sys
import textwrap
import time
from pathlib import Path
from typing import TextIO

import click

from kfp_ddp.core.text import bar
from kfp_ddp.jobs.progress import MetricsTail, TrainingProgress, clock

CLEAR_LINE = "\r\x1b[2K"
DETAIL_WIDTH = 66
REST_WIDTH = 29  # mark, name and seconds of a line, which must not wrap
INDENT = 20  # of the detail
LOG_SECONDS = 60.0
"""Interval of the lines about a running phase that a pipe or file gets."""
SHORTEST_BAR = 4
"""Characters of the narrowest bar of a training."""


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
        if not self._live:
            return DETAIL_WIDTH
        columns = shutil.get_terminal_size().columns
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
        texts = [self.detail]
        if self._live and self.detail.strip():
            texts = textwrap.wrap(self.detail, self.width, break_on_hyphens=False)
        first, *others = texts
        clear = CLEAR_LINE if self._live else ""
        line = self._line("✓" if good else "✗", first)
        rest = "".join(f"{' ' * INDENT}{text}\n" for text in others)
        self._write(f"{clear}{line}\n{rest}")

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


class RunProgress:
    """The progress of the trainings of a run, from their growing files of metrics."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self._training = TrainingProgress()
        self._tail: MetricsTail | None = None

    def line(self, width: int) -> str:
        """Return bar, step, figures and remaining time, as far as the width allows."""
        if self._tail is None:
            for file in self._output.glob("work/*/*/metrics.jsonl"):
                self._tail = MetricsTail(file)
                break
        training = self._training
        if self._tail is not None:
            training.update(self._tail.read())
        if training.last is None:
            return "starting the ranks"
        line = training.line(width)
        space = min(10, width - len(line) - 1)
        done = bar(min(1.0, training.step / max(training.total, 1)), space)
        return f"{done} {line}" if space >= SHORTEST_BAR else line


def shown(path: str | Path) -> str:
    """Return the path relative to the working directory, quoted for a shell."""
    here = Path.cwd()
    full = Path(os.path.abspath(path))
    short = full.relative_to(here) if full.is_relative_to(here) else full
    return shlex.quote(str(short))
