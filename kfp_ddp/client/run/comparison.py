"""Compare runs: settings that differ, metrics with their confidence intervals, curves."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median_high
from typing import Any, NamedTuple

from kfp_ddp.client.run.run_info import RunInfo
from kfp_ddp.core import packed
from kfp_ddp.jobs.progress import clock
from kfp_ddp.report.charts import COLOURS, Series, line_chart
from kfp_ddp.report.events import curve, is_number, training_time
from kfp_ddp.report.render import render
from kfp_ddp.runs.record import TaskRecord
from kfp_ddp.training.spec.config import TrainConfig

IGNORED = TrainConfig.set_by_step | {"cache_dir", "resume"}
"""Settings that differ between any two runs, or do not change the model."""
NONE = "–"
CHARTS = (
    ("Validation accuracy", "eval", "accuracy", True),
    ("Validation loss", "eval", "loss", False),
    ("Training loss", "step", "loss", False),
    ("Images per second", "step", "images_per_s", False),
)


@dataclass(frozen=True)
class ComparedTraining:
    """One training of one run, with its letter in the tables."""

    letter: str
    name: str
    run: RunInfo
    training: TaskRecord


class Figure(NamedTuple):
    """A metric of one side, with its 95 % confidence interval if it has one."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Metric:
    """A metric of all sides; None for a side without it."""

    name: str
    figures: tuple[Figure | None, ...]
    text: Callable[[float], str]

    def texts(self) -> list[str]:
        """Return the figures as text."""
        texts = []
        for figure in self.figures:
            parts = [self.text(part) for part in figure or () if part is not None]
            value, *limits = parts or [NONE]
            texts.append(f"{value} ({' to '.join(limits)})" if limits else value)
        return texts


@dataclass(frozen=True)
class Comparison:
    """Trainings with their differences."""

    sides: tuple[ComparedTraining, ...]
    settings: dict[str, tuple[Any, ...]]
    """Those that differ, by name: the value of each side, None for a side without it."""
    metrics: tuple[Metric, ...]
    notes: tuple[str, ...]

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


def compare(runs: Sequence[tuple[RunInfo, Sequence[TaskRecord]]]) -> Comparison:
    """Compare the trainings of runs, in the given order."""
    rows = [(run, training, len(trainings)) for run, trainings in runs for training in trainings]
    sides = tuple(
        ComparedTraining(
            chr(ord("A") + number) if number < 26 else f"#{number + 1}",
            f"{run.name}/{training.task}" if count > 1 else run.name,
            run,
            training,
        )
        for number, (run, training, count) in enumerate(rows)
    )
    return Comparison(sides, _settings(sides), _metrics(sides), tuple(_notes(sides)))


def setting_text(value: Any) -> str:
    """Return a setting as text."""
    if value is None:
        return NONE
    value = packed.describe(value)
    return value or "''" if isinstance(value, str) else json.dumps(value)


def _settings(sides: Sequence[ComparedTraining]) -> dict[str, tuple[Any, ...]]:
    # An old run had the default of a setting that was added later.
    defaults = {
        name: field.get_default(call_default_factory=True)
        for name, field in TrainConfig.model_fields.items()
        if not field.is_required()
    }
    tables = []
    for side in sides:
        settings, evaluation = side.training.settings, side.training.evaluation
        folder = str(settings.get("data", "")).rstrip("/").rpartition("/")[2]
        version = (evaluation and evaluation.dataset_digest[:12]) or folder or None
        tables.append({"dataset": version, **(defaults if settings else {}), **settings})
    names = dict.fromkeys(name for table in tables for name in table if name not in IGNORED)
    rows = {name: tuple(table.get(name) for table in tables) for name in names}
    return {name: row for name, row in rows.items() if any(value != row[0] for value in row)}


def _metrics(sides: Sequence[ComparedTraining]) -> tuple[Metric, ...]:
    def row(name: str, read: Callable[[TaskRecord], Any], text: Callable[[float], str]) -> Metric:
        values = [read(side.training) for side in sides]
        figures = [Figure(value) if is_number(value) else value for value in values]
        return Metric(name, tuple(f if isinstance(f, Figure) else None for f in figures), text)

    def evaluated(field: str, text: Callable[[float], str]) -> Metric:
        return row(field, lambda training: getattr(training.evaluation, field, None), text)

    def accuracy(training: TaskRecord) -> Figure | None:
        one = training.evaluation
        return Figure(one.accuracy, one.accuracy_low, one.accuracy_high) if one else None

    def ranks(training: TaskRecord) -> Any:
        starts = training.select("start")
        return starts[-1].get("world_size") if starts else None

    def speed(training: TaskRecord) -> Any:
        speeds = [e["images_per_s"] for e in training.select("step") if "images_per_s" in e]
        return median_high(speeds) if speeds else None

    percent, rounded, whole = "{:.1%}".format, "{:.4g}".format, "{:,.0f}".format
    rows = (
        row("accuracy", accuracy, percent),
        evaluated("top5", percent),
        *(evaluated(field, rounded) for field in ("loss", "macro_f1", "calibration_error")),
        evaluated("samples", whole),
        row("step", lambda training: training.checkpoint, whole),
        row("ranks", ranks, whole),
        row("images_per_s", speed, whole),
        # From first to last event, without pauses before a resume.
        row("training_seconds", lambda training: training_time(training.events)[0] or None, clock),
        row("gpu_hours", lambda training: training.cost.gpu_hours or None, "{:,.4f}".format),
        row("cost", lambda training: training.cost.money, "{:.2f}".format),
    )
    return tuple(metric for metric in rows if any(metric.figures))


def _notes(sides: Sequence[ComparedTraining]) -> list[str]:
    notes = []
    for one, two in combinations(sides, 2):
        first, second = one.training.evaluation, two.training.evaluation
        if first is None or second is None:
            continue
        pair = f"{one.letter} and {two.letter}"
        if differ := first.differs(second):
            notes.append(f"{pair} are {differ}: their metrics cannot be compared")
        elif max(first.accuracy_low, second.accuracy_low) <= min(
            first.accuracy_high, second.accuracy_high
        ):
            notes.append(f"{pair}: the intervals of their accuracies overlap")
    without = [side.letter for side in sides if side.training.evaluation is None]
    return notes + ([f"{', '.join(without)}: not evaluated"] if without else [])


def to_html(comparison: Comparison) -> str:
    """Return a page with the tables and the curves of all runs."""
    sides = comparison.sides
    facts = [
        ("run", [side.name for side in sides]),
        ("id", [side.run.id for side in sides]),
        ("state", [side.run.state for side in sides]),
        ("started", [f"{s.run.start:%Y-%m-%d %H:%M} UTC" if s.run.start else "" for s in sides]),
    ]
    charts = []
    for title, kind, key, percent in CHARTS:
        curves = [(side.letter, curve(side.training.events, kind, key)) for side in sides]
        series = [Series(*one, number % COLOURS) for number, one in enumerate(curves)]
        charts.append(line_chart(title, series, percent=percent))
    return render(
        "comparison.html",
        title="Runs compared",
        letters=[side.letter for side in sides],
        colours=COLOURS,
        facts=facts,
        metrics=[(m.name.replace("_", " "), m.texts()) for m in comparison.metrics],
        notes=comparison.notes,
        settings=[(name, map(setting_text, row)) for name, row in comparison.settings.items()],
        charts=charts,
    )
