"""Compare runs: settings that differ, and metrics with their confidence intervals."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, combinations
from typing import Any

from kfp_ddp.client.run.compared import (
    ComparedTraining,
    Comparison,
    Figure,
    Metric,
    Trained,
    letter,
)
from kfp_ddp.jobs.progress import clock
from kfp_ddp.models.evaluation import Better, Evaluation, figures_for
from kfp_ddp.models.evaluation import Figure as EvaluationFigure
from kfp_ddp.runs.record import TaskRecord
from kfp_ddp.training.spec.config import TrainConfig

IGNORED = TrainConfig.set_by_step | {"cache_dir", "resume"}
"""Settings that differ between any two runs, or do not change the model."""
_FORMATS = {"share": "{:.1%}", "number": "{:.4g}", "count": "{:,.0f}"}


def compare(runs: Sequence[Trained]) -> Comparison:
    """Compare the trainings of runs, in the given order."""
    sides: list[ComparedTraining] = []
    for trained in runs:
        for name, training, accuracy in trained.ranked():
            place = letter(len(sides))
            sides.append(ComparedTraining(place, name, trained.run, training, accuracy))
    return Comparison(tuple(sides), _settings(sides), _metrics(sides), tuple(_notes(sides)))


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
        return Metric(name, tuple(Figure.of(read(side.training)) for side in sides), text, better)

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
    of_trials = tuple(Figure.of(side.accuracy) for side in sides)
    rows = (
        Metric("accuracy_in_training", of_trials, _FORMATS["share"].format, "higher"),
        *map(evaluated, figures_for("comparison")),
        row("step", lambda training: training.checkpoint, whole),
        row("ranks", lambda training: training.ranks, whole),
        row("images_per_s", lambda training: training.speed, whole, "higher"),
        row("training_seconds", lambda training: training.seconds, clock, "lower"),
        row("gpu_hours", lambda task: task.cost.gpu_hours or None, "{:,.4f}".format, "lower"),
        row("cost", lambda training: training.cost.money, "{:.2f}".format, "lower"),
    )
    return tuple(metric for metric in rows if any(metric.figures))


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
