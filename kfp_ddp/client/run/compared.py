"""Trainings with their differences, and the table of them."""

import io
import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kfp_ddp.client.run.run_info import RunInfo
from kfp_ddp.core import packed
from kfp_ddp.core.text import printable
from kfp_ddp.models.evaluation import Better
from kfp_ddp.report.events import is_number
from kfp_ddp.runs.record import TaskRecord
from kfp_ddp.runs.trials import TrialRecord

NONE = "–"
NAME_WIDTH = 18
SIDE_WIDTH = 12
"""Characters of a column at least: five trainings fit in 80."""


@dataclass(frozen=True)
class ComparedTraining:
    """One training of one run, with its letter in the tables."""

    letter: str
    name: str
    run: RunInfo
    training: TaskRecord
    accuracy: float | None = None
    """In its own evaluation, if it is a trial of a sweep."""


class Figure(NamedTuple):
    """A metric of one side, with its 95 % confidence interval if it has one."""

    value: float
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, value: Any) -> "Figure | None":
        """Return what was read as a figure; None for what is no number."""
        if isinstance(value, Figure):
            return value
        return cls(value) if is_number(value) else None


@dataclass(frozen=True)
class Metric:
    """A metric of all sides; None for a side without it."""

    name: str
    figures: tuple[Figure | None, ...]
    text: Callable[[float], str]
    better: Better = ""
    """Which values are the better ones; '' if the metric does not order the sides."""

    @property
    def title(self) -> str:
        """The name as words."""
        return self.name.replace("_", " ")

    def best(self) -> float | None:
        """Return the best value; None if it is that of all sides, or of the only one."""
        values = [figure.value for figure in self.figures if figure]
        if not self.better or len(set(values)) < 2:
            return None
        return max(values) if self.better == "higher" else min(values)

    def intervals(self) -> list[str]:
        """Return the confidence intervals as text; empty if no side has one."""
        texts = [self._interval(figure) for figure in self.figures]
        return texts if any(texts) else []

    def _interval(self, figure: Figure | None) -> str:
        if figure is None:
            return ""
        if figure.low is None or figure.high is None:
            return ""
        low = self.text(figure.low).removesuffix("%")
        return f"{low}–{self.text(figure.high)}"


@dataclass(frozen=True)
class Comparison:
    """Trainings with their differences."""

    sides: tuple[ComparedTraining, ...]
    settings: dict[str, tuple[Any, ...]]
    """Those that differ, by name: the value of each side, None for a side without it."""
    metrics: tuple[Metric, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        width = shutil.get_terminal_size().columns
        terminal = Console(file=io.StringIO(), width=width, highlight=False, color_system=None)
        with terminal.capture() as captured:
            self.print(terminal)
        return "\n".join(line.rstrip() for line in captured.get().rstrip().splitlines())

    def print(self, terminal: Console) -> None:
        """Print the table, in parts if the terminal is too narrow for all columns."""
        names_width = max(NAME_WIDTH, terminal.width // 4)
        at_once = max(1, (terminal.width - names_width) // SIDE_WIDTH)
        rows = _rows(self)
        for start in range(0, len(self.sides), at_once):
            sides = self.sides[start : start + at_once]
            share = max(SIDE_WIDTH, (terminal.width - names_width) // len(sides))
            table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
            table.add_column(min_width=NAME_WIDTH, max_width=names_width, overflow="fold")
            for _ in sides:
                table.add_column(max_width=share - 2, overflow="fold")
            for name, cells in rows:
                table.add_row(name, *cells[start : start + at_once])
            terminal.print(table, "")
        if any(metric.best() is not None for metric in self.metrics):
            terminal.print("* best of its row")
        if not self.settings:
            terminal.print("All settings are equal.")
        for note in self.notes:
            terminal.print(Text(f"{note}."))

    def document(self) -> dict[str, Any]:
        """Return the comparison as JSON."""
        runs = [
            {
                **side.run.document(),
                "letter": side.letter,
                "name": side.name,
                "task": side.training.task,
                "verdict": side.training.verdict.get("reason", ""),
                "bundle": side.training.exported.get("uri", ""),
            }
            for side in self.sides
        ]
        metrics = {
            metric.name: [figure and figure._asdict() for figure in metric.figures]
            for metric in self.metrics
        }
        return {"runs": runs, "settings": self.settings, "metrics": metrics, "notes": self.notes}


class Trained(NamedTuple):
    """A run with its trainings, and the trials that they are of a sweep, the best first."""

    run: RunInfo
    trainings: Sequence[TaskRecord]
    trials: Sequence[TrialRecord] = ()

    def ranked(self) -> list[tuple[str, TaskRecord, float | None]]:
        """Return names, trainings and their accuracies as trials, the best first."""
        none = (0, None)
        places = {trial.task: (place, trial.accuracy) for place, trial in enumerate(self.trials)}
        ordered = sorted(self.trainings, key=lambda training: places.get(training.task, none)[0])
        several = len(ordered) > 1
        return [
            (self._name(training, several), training, places.get(training.task, none)[1])
            for training in ordered
        ]

    def _name(self, training: TaskRecord, several: bool) -> str:
        return f"{self.run.name}/{training.task}" if several else self.run.name


def letter(number: int) -> str:
    """Return the letter of a side."""
    return chr(ord("A") + number) if number < 26 else f"#{number + 1}"


def setting_text(value: Any) -> str:
    """Return a setting as text."""
    if value is None:
        return NONE
    value = packed.describe(value)
    return value or "''" if isinstance(value, str) else json.dumps(value)


def _rows(compared: Comparison) -> list[tuple[Text, list[Text]]]:
    """Return the rows of the table, each with a name and a cell for each training."""
    rows: list[tuple[Text, list[Text]]] = []

    def add(name: str, cells: Iterable[str], style: str = "") -> None:
        rows.append((Text(printable(name)), [Text(printable(cell), style) for cell in cells]))

    add("", [side.letter for side in compared.sides], "bold")
    add("run", [side.name for side in compared.sides])
    add("id", [side.run.id[:8] for side in compared.sides])
    add("state", [side.run.state for side in compared.sides])
    add("", [])
    for metric in compared.metrics:
        rows.append((Text(metric.title), _figures(metric)))
        if intervals := metric.intervals():
            add("  95 % interval", intervals, "dim")
    add("", [])
    for setting, values in compared.settings.items():
        add(setting, map(setting_text, values))
    return rows


def _figures(metric: Metric) -> list[Text]:
    """Return the cells of a metric, with a mark at the best."""
    best = metric.best()
    cells = []
    for figure in metric.figures:
        if figure is None:
            cells.append(Text(NONE))
        elif figure.value == best:
            cells.append(Text(f"{metric.text(figure.value)} *", "bold green"))
        else:
            cells.append(Text(metric.text(figure.value)))
    return cells
