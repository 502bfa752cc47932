"""Compare runs: settings that differ, and metrics with their confidence intervals."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from statistics import median_high
from typing import Any, NamedTuple

from kfp_ddp.client.run.run_info import RunInfo
from kfp_ddp.core import packed
from kfp_ddp.jobs.progress import clock
from kfp_ddp.models.evaluation import Better, Evaluation, figures_for
from kfp_ddp.models.evaluation import Figure as EvaluationFigure
from kfp_ddp.report.events import is_number, training_time
from kfp_ddp.runs.record import TaskRecord
from kfp_ddp.training.spec.config import TrainConfig

IGNORED = TrainConfig.set_by_step | {"cache_dir", "resume"}
"""Settings that differ between any two runs, or do not change the model."""
NONE = "–"
_FORMATS = {"share": "{:.1%}", "number": "{:.4g}", "count": "{:,.0f}"}


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
    sides: list[ComparedTraining] = []
    for run, trainings in runs:
        for training in trainings:
            name = f"{run.name}/{training.task}" if len(trainings) > 1 else run.name
            sides.append(ComparedTraining(_letter(len(sides)), name, run, training))
    return Comparison(tuple(sides), _settings(sides), _metrics(sides), tuple(_notes(sides)))


def _letter(number: int) -> str:
    return chr(ord("A") + number) if number < 26 else f"#{number + 1}"


def setting_text(value: Any) -> str:
    """Return a setting as text."""
    if value is None:
        return NONE
    value = packed.describe(value)
    return value or "''" if isinstance(value, str) else json.dumps(value)


def _settings(sides: Sequence[ComparedTraining]) -> dict[str, tuple[Any, ...]]:
    tables = [_settings_of(side.training) for side in sides]
    rows = {}
    for name in dict.fromkeys(chain.from_iterable(tables)):
        row = tuple(table.get(name) for table in tables)
        differs = any(value != row[0] for value in row)
        if differs and name not in IGNORED:
            rows[name] = row
    return rows


def _settings_of(training: TaskRecord) -> dict[str, Any]:
    """Return the settings of a training, with its dataset version, or else its folder."""
    settings = training.settings
    version: str | None = str(settings.get("data", "")).rstrip("/").rpartition("/")[2] or None
    if training.evaluation and training.evaluation.dataset_digest:
        version = training.evaluation.dataset_digest[:12]
    # An old run had the default of a setting that was added later.
    defaults = _defaults() if settings else {}
    return {"dataset": version, **defaults, **settings}


def _defaults() -> dict[str, Any]:
    return {
        name: field.get_default(call_default_factory=True)
        for name, field in TrainConfig.model_fields.items()
        if not field.is_required()
    }


def _metrics(sides: Sequence[ComparedTraining]) -> tuple[Metric, ...]:
    # Figures of different samples have no best one.
    same_samples = not any(first.differs(second) for _, first, _, second in _evaluated_pairs(sides))

    def row(
        name: str,
        read: Callable[[TaskRecord], Any],
        text: Callable[[float], str],
        better: Better = "",
    ) -> Metric:
        return Metric(name, tuple(_figure(read(side.training)) for side in sides), text, better)

    def evaluated(figure: EvaluationFigure) -> Metric:
        def read(training: TaskRecord) -> Any:
            value = getattr(training.evaluation, figure.name, None)
            if training.evaluation is None or value is None or figure.interval != "always":
                return value
            interval = training.evaluation.interval(figure.name)
            return Figure(value, interval.low, interval.high) if interval else value

        better = figure.better if same_samples else ""
        return row(figure.name, read, _FORMATS[figure.form].format, better)

    whole = _FORMATS["count"].format
    rows = (
        *map(evaluated, figures_for("comparison")),
        row("step", lambda training: training.checkpoint, whole),
        row("ranks", _ranks, whole),
        row("images_per_s", _speed, whole, "higher"),
        row("training_seconds", _seconds, clock, "lower"),
        row("gpu_hours", lambda task: task.cost.gpu_hours or None, "{:,.4f}".format, "lower"),
        row("cost", lambda training: training.cost.money, "{:.2f}".format, "lower"),
    )
    return tuple(metric for metric in rows if any(metric.figures))


def _figure(value: Any) -> Figure | None:
    """Return what was read as a figure; None for what is no number."""
    if isinstance(value, Figure):
        return value
    return Figure(value) if is_number(value) else None


def _ranks(training: TaskRecord) -> Any:
    starts = training.select("start")
    return starts[-1].get("world_size") if starts else None


def _speed(training: TaskRecord) -> float | None:
    """Return the median images per second of the steps."""
    steps = training.select("step")
    speeds = [event["images_per_s"] for event in steps if "images_per_s" in event]
    return median_high(speeds) if speeds else None


def _seconds(training: TaskRecord) -> float | None:
    """Return the time from first to last event, without pauses before a resume."""
    return training_time(training.events)[0] or None


def _evaluated_pairs(
    sides: Sequence[ComparedTraining],
) -> Iterator[tuple[str, Evaluation, str, Evaluation]]:
    """Yield each two sides that are evaluated: letter and evaluation of both."""
    for one, two in combinations(sides, 2):
        first = one.training.evaluation
        second = two.training.evaluation
        if first and second:
            yield one.letter, first, two.letter, second


def _notes(sides: Sequence[ComparedTraining]) -> list[str]:
    """Return what holds for pairs of sides, a line for each reason."""
    pairs: dict[str, list[str]] = {}
    for one, first, two, second in _evaluated_pairs(sides):
        if differ := first.differs(second):
            reason = f" are {differ}: their metrics cannot be compared"
        elif _overlap(first, second):
            reason = ": the intervals of their accuracies overlap"
        else:
            continue
        pairs.setdefault(reason, []).append(f"{one} and {two}")
    notes = [f"{', '.join(names)}{reason}" for reason, names in pairs.items()]
    without = [side.letter for side in sides if side.training.evaluation is None]
    if without:
        notes.append(f"{', '.join(without)}: not evaluated")
    return notes


def _overlap(one: Evaluation, two: Evaluation) -> bool:
    low = max(one.accuracy_low, two.accuracy_low)
    return low <= min(one.accuracy_high, two.accuracy_high)
