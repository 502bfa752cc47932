"""The trials of a sweep as its step records them, and their table in a terminal."""

import contextlib
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from kfp_ddp.core.files import atomic_write
from kfp_ddp.core.settings import Stored, mapping_of
from kfp_ddp.core.text import one_line, printable

FILE = "trials.json"
"""In the folder of the step that trains the trials."""
SHOWN = 20
"""Trials in the table; the report of the sweep has all."""
TITLES = f"  {'':>3}  {'accuracy':>8}  {'loss':>8}  {'epochs':>6}  settings"


class TrialRecord(Stored):
    """A trial with its result so far."""

    task: str
    """Name of its training's folder in that of the run."""
    rank: int = 0
    """1 for the best; 0 for one that has no result."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Those that it tries, then others that are not the same in all trials."""
    accuracy: float | None = None
    """Of its checkpoint, in the training's own evaluation."""
    loss: float | None = None
    epochs: float = 0.0
    hours: float = 0.0
    """Of all ranks."""
    state: str = ""
    """Whether it trains, waits, is done, or why it ended."""

    def line(self) -> str:
        """Return its line in the table."""
        rank = self.rank or "–"
        accuracy = figure(self.accuracy, ".1%")
        settings = [f"{name}={setting_text(value)}" for name, value in self.settings.items()]
        end = "" if self.state == "done" else f"; {one_line(self.state)}"
        figures = f"  {rank:>3}  {accuracy:>8}  {figure(self.loss, '.4f'):>8}  {self.epochs:>6g}"
        return printable(f"{figures}  {', '.join(settings)}{end}")


class Trials(Stored):
    """The trials of a sweep, the best first."""

    trials: tuple[TrialRecord, ...] = ()

    def write(self, folder: Path) -> None:
        """Write the record to the folder of the step."""
        with atomic_write(folder / FILE) as file:
            file.write(self.model_dump_json().encode())


def read_trials(folder: Path) -> tuple[TrialRecord, ...]:
    """Return the trials in a run's folder, the best first; empty without a sweep."""
    for path in sorted(folder.glob(f"*/{FILE}")):
        with contextlib.suppress(ValidationError):
            return Trials.model_validate(mapping_of(path)).trials
    return ()


def table(trials: Sequence[TrialRecord], width: int) -> Iterator[str]:
    """Yield the best trials of a sweep, in lines up to a width; nothing without a sweep."""
    if not trials:
        return
    hours = sum(trial.hours for trial in trials)
    shown = trials[:SHOWN]
    yield f"  trials      the best {len(shown)} of {len(trials)}; {hours:.2g} hours of all ranks"
    yield TITLES
    indent = " " * (len(TITLES) - len("settings"))
    for trial in shown:
        yield from textwrap.wrap(
            trial.line(), width, subsequent_indent=indent, break_on_hyphens=False
        )


def figure(value: float | None, form: str) -> str:
    """Return a figure as text; '' if it is unknown."""
    return "" if value is None else format(value, form)


def setting_text(value: Any) -> str:
    """Return the value of a setting, in a few characters."""
    return f"{value:g}" if isinstance(value, float) else one_line(value, 60)
