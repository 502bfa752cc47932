"""Compare runs: settings that differ, metrics with their confidence intervals, curves."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import combinations
from typing import Any

from kfp_ddp.client.run_info import RunInfo
from kfp_ddp.client.trainings import Training
from kfp_ddp.core import packed
from kfp_ddp.jobs.progress import clock
from kfp_ddp.models.evaluation import Evaluation
from kfp_ddp.report.charts import COLOURS, Series, line_chart
from kfp_ddp.report.events import curve, is_number, training_time
from kfp_ddp.report.render import render_page
from kfp_ddp.training.config import TrainConfig

IGNORED = TrainConfig.own | {"cache_dir", "resume"}
"""Settings that differ between any two runs, or do not change the model."""
NONE = "–"
CHARTS = (
    ("Validation accuracy", "eval", "accuracy", True),
    ("Validation loss", "eval", "loss", False),
    ("Training loss", "step", "loss", False),
    ("Images per second", "step", "images_per_s", False),
)


@dataclass(frozen=True)
class Side:
    """One training of one run, with its letter in the tables."""

    letter: str
    name: str
    run_id: str
    state: str
    start: datetime | None
    training: Training


@dataclass(frozen=True)
class Figure:
    """A metric of one side, with its 95 % confidence interval if it has one."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Metric:
    """A metric of all sides; None for a side without it."""

    name: str
    figures: tuple[Figure | None, ...]
    format: Callable[[float], str]

    def texts(self) -> list[str]:
        """Return the figures as text."""
        return [self._text(figure) for figure in self.figures]

    def _text(self, figure: Figure | None) -> str:
        if figure is None:
            return NONE
        if figure.low is None or figure.high is None:
            return self.format(figure.value)
        low, high = self.format(figure.low), self.format(figure.high)
        return f"{self.format(figure.value)} ({low} to {high})"


@dataclass(frozen=True)
class Comparison:
    """Trainings with their differences."""

    sides: tuple[Side, ...]
    settings: dict[str, tuple[Any, ...]]
    """Those that differ, by name: the value of each side, None for a side without it."""
    metrics: tuple[Metric, ...]
    notes: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """Return the comparison as JSON."""
        runs = [
            {
                "letter": side.letter,
                "name": side.name,
                "run_id": side.run_id,
                "task": side.training.task,
                "state": side.state,
                "start": side.start.isoformat() if side.start else None,
                "verdict": side.training.verdict.get("reason", ""),
                "bundle": side.training.exported.get("uri", ""),
            }
            for side in self.sides
        ]
        metrics = {
            metric.name: [asdict(figure) if figure else None for figure in metric.figures]
            for metric in self.metrics
        }
        settings = {name: list(values) for name, values in self.settings.items()}
        return {"runs": runs, "settings": settings, "metrics": metrics, "notes": self.notes}


def compare(runs: Sequence[tuple[RunInfo, Sequence[Training]]]) -> Comparison:
    """Compare the trainings of runs, in the given order."""
    rows = [(run, training, len(trainings)) for run, trainings in runs for training in trainings]
    sides = tuple(
        Side(
            letter=chr(ord("A") + number) if number < 26 else f"#{number + 1}",
            name=f"{run.name}/{training.task}" if count > 1 else run.name,
            run_id=run.id,
            state=run.state,
            start=run.start,
            training=training,
        )
        for number, (run, training, count) in enumerate(rows)
    )
    return Comparison(sides, _settings(sides), _metrics(sides), tuple(_notes(sides)))


def setting_text(value: Any) -> str:
    """Return a setting as text."""
    if value is None:
        return NONE
    value = packed.in_words(value)
    return value or "''" if isinstance(value, str) else json.dumps(value)


def _settings(sides: Sequence[Side]) -> dict[str, tuple[Any, ...]]:
    # An old run had the default of a setting that was added later.
    defaults = {
        name: field.get_default(call_default_factory=True)
        for name, field in TrainConfig.model_fields.items()
        if not field.is_required()
    }
    tables = [
        {
            "dataset": _dataset(training),
            **(defaults if training.settings else {}),
            **training.settings,
        }
        for training in (side.training for side in sides)
    ]
    names = dict.fromkeys(name for table in tables for name in table if name not in IGNORED)
    rows = {name: tuple(table.get(name) for table in tables) for name in names}
    return {name: row for name, row in rows.items() if any(value != row[0] for value in row)}


def _dataset(training: Training) -> str | None:
    """Return the dataset version that was trained on."""
    if training.evaluation and training.evaluation.dataset_digest:
        return training.evaluation.dataset_digest[:12]
    data = str(training.settings.get("data", ""))
    return data.rstrip("/").rpartition("/")[2] or None


def _metrics(sides: Sequence[Side]) -> tuple[Metric, ...]:
    def row(name: str, figure: Callable[[Training], Figure | None], text: Any) -> Metric:
        return Metric(name, tuple(figure(side.training) for side in sides), text)

    def evaluated(field: str) -> Callable[[Training], Figure | None]:
        return lambda training: _figure(getattr(training.evaluation, field, None))

    rows = (
        row("accuracy", lambda training: _accuracy(training.evaluation), _percent),
        row("top5", evaluated("top5"), _percent),
        row("loss", evaluated("loss"), _short),
        row("macro_f1", evaluated("macro_f1"), _short),
        row("calibration_error", evaluated("calibration_error"), _short),
        row("samples", evaluated("samples"), _integer),
        row("step", lambda training: _figure(training.checkpoint), _integer),
        row("ranks", lambda t: _figure(_last(t.of("start"), "world_size")), _integer),
        row("images_per_s", _speed, _integer),
        row("training_seconds", _seconds, clock),
    )
    return tuple(metric for metric in rows if any(metric.figures))


def _accuracy(result: Evaluation | None) -> Figure | None:
    return Figure(result.accuracy, result.accuracy_low, result.accuracy_high) if result else None


def _figure(value: Any) -> Figure | None:
    return Figure(value) if is_number(value) else None


def _last(events: Sequence[dict[str, Any]], key: str) -> Any:
    return events[-1].get(key) if events else None


def _speed(training: Training) -> Figure | None:
    """Return the median over the steps that report it."""
    speeds = sorted(e["images_per_s"] for e in training.of("step") if "images_per_s" in e)
    return _figure(speeds[len(speeds) // 2]) if speeds else None


def _seconds(training: Training) -> Figure | None:
    """Return the time from first to last event, without pauses before a resume."""
    total, _ = training_time(training.events)
    return _figure(total) if total else None


def _notes(sides: Sequence[Side]) -> list[str]:
    notes = []
    for one, two in combinations(sides, 2):
        first, second = one.training.evaluation, two.training.evaluation
        if first is None or second is None:
            continue
        pair = f"{one.letter} and {two.letter}"
        if differ := first.differs(second):
            notes.append(f"{pair} are {differ}: their metrics cannot be compared")
        elif first.accuracy_low <= second.accuracy_high and (
            second.accuracy_low <= first.accuracy_high
        ):
            notes.append(f"{pair}: the intervals of their accuracies overlap")
    without = [side.letter for side in sides if side.training.evaluation is None]
    return notes + ([f"{', '.join(without)}: not evaluated"] if without else [])


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _short(value: float) -> str:
    return f"{value:.4g}"


def _integer(value: float) -> str:
    return f"{value:,.0f}"


def to_html(comparison: Comparison) -> str:
    """Return a page with the tables and the curves of all runs."""
    sides = comparison.sides
    facts = [
        ("run", [side.name for side in sides]),
        ("id", [side.run_id for side in sides]),
        ("state", [side.state for side in sides]),
        ("started", [f"{s.start:%Y-%m-%d %H:%M} UTC" if s.start else "" for s in sides]),
    ]
    charts = []
    for title, kind, key, percent in CHARTS:
        series = [
            Series(side.letter, curve(side.training.events, kind, key), number % COLOURS)
            for number, side in enumerate(sides)
        ]
        charts.append(line_chart(title, series, "epoch", percent=percent))
    return render_page(
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
