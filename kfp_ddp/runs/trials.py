"""The trials of a sweep as its step records them, and their table in a terminal."""

import contextlib
import math
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from pydantic import Field, ValidationError

from kfp_ddp.core.files import atomic_write
from kfp_ddp.core.settings import Stored, mapping_of
from kfp_ddp.core.text import one_line, printable

FILE = "trials.json"
"""In the folder of the step that trains the trials."""
SHOWN = 20
"""Trials in the table; the report of the sweep has all."""
T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""97.5 % points of Student's t for 1, 2, ... degrees of freedom, from its tables."""
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
    yield from _means_over_folds(trials)


def _means_over_folds(trials: Sequence[TrialRecord]) -> Iterator[str]:
    """Yield the mean accuracy of trials that differ in their fold alone, the best first.

    The interval is Student's, of 95 %. Folds share images to train on, so it is approximate.
    """
    groups: dict[str, list[float]] = {}
    for trial in trials:
        if "fold" in trial.settings and trial.accuracy is not None:
            others = {name: value for name, value in trial.settings.items() if name != "fold"}
            words = ", ".join(f"{name}={setting_text(value)}" for name, value in others.items())
            groups.setdefault(words, []).append(trial.accuracy)
    several = {words: group for words, group in groups.items() if len(group) > 1}
    for words, group in sorted(several.items(), key=lambda item: -fmean(item[1])):
        mean = fmean(group)
        reach = T95[min(len(group), len(T95)) - 2] * stdev(group) / math.sqrt(len(group))
        interval = f"interval {max(0.0, mean - reach):.1%} to {min(1.0, mean + reach):.1%}"
        yield f"  mean        {mean:.1%} of {len(group)} folds, {interval}  {words}".rstrip()


def figure(value: float | None, form: str) -> str:
    """Return a figure as text; '' if it is unknown."""
    return "" if value is None else format(value, form)


def setting_text(value: Any) -> str:
    """Return the value of a setting, in a few characters."""
    return f"{value:g}" if isinstance(value, float) else one_line(value, 60)
