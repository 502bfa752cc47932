"""Runs set side by side: settings that differ, metrics with their intervals, what to mind."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import combinations
from typing import Any

from kfp_ddp.client.inspection.subject import Subject
from kfp_ddp.client.inspection.trainings import Training
from kfp_ddp.core import packed
from kfp_ddp.jobs.progress import clock
from kfp_ddp.models.evaluation import Evaluation
from kfp_ddp.report.events import is_number, training_time
from kfp_ddp.training.config import TrainConfig

OWN = frozenset({"data", "output_dir", "run_id", "cache_dir", "stop_when_stale", "resume"})
"""Settings that differ between any two runs, or say nothing of the model."""
NONE = "–"


@dataclass(frozen=True)
class Side:
    """One training of one run, under the letter that stands for it."""

    letter: str
    name: str
    run_id: str
    state: str
    start: datetime | None
    training: Training


@dataclass(frozen=True)
class Figure:
    """A metric of one side; `low` and `high` bound its 95 % interval, where it has one."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Metric:
    """A row of figures, one a side: None where a side has none."""

    name: str
    figures: tuple[Figure | None, ...]
    show: Callable[[float], str]

    def texts(self) -> list[str]:
        """As people read them."""
        return [self._text(each) for each in self.figures]

    def _text(self, figure: Figure | None) -> str:
        if figure is None:
            return NONE
        if figure.low is None or figure.high is None:
            return self.show(figure.value)
        return f"{self.show(figure.value)} ({self.show(figure.low)} to {self.show(figure.high)})"


@dataclass(frozen=True)
class Comparison:
    """All of it."""

    sides: tuple[Side, ...]
    settings: dict[str, tuple[Any, ...]]
    """Those that differ, by name: a value a side, None where a side has none."""
    metrics: tuple[Metric, ...]
    notes: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """As JSON has it."""
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
            metric.name: [asdict(each) if each else None for each in metric.figures]
            for metric in self.metrics
        }
        settings = {name: list(values) for name, values in self.settings.items()}
        return {"runs": runs, "settings": settings, "metrics": metrics, "notes": self.notes}


def compare(found: Sequence[tuple[Subject, Sequence[Training]]]) -> Comparison:
    """Set the trainings of runs side by side, in the order in which they were named."""
    pairs = [
        (subject, training, f"{subject.name}/{training.task}" if len(each) > 1 else subject.name)
        for subject, each in found
        for training in each
    ]
    sides = tuple(
        Side(
            letter=_letter(number),
            name=name,
            run_id=subject.id,
            state=subject.state,
            start=subject.start,
            training=training,
        )
        for number, (subject, training, name) in enumerate(pairs)
    )
    return Comparison(sides, _settings(sides), _metrics(sides), tuple(_notes(sides)))


def shown(value: Any) -> str:
    """A setting as people read it."""
    if value is None:
        return NONE
    value = packed.in_words(value)
    return value or "''" if isinstance(value, str) else json.dumps(value)


def _letter(number: int) -> str:
    return chr(ord("A") + number) if number < 26 else f"#{number + 1}"


def _settings(sides: Sequence[Side]) -> dict[str, tuple[Any, ...]]:
    # A setting that is newer than a run was its default there.
    newer = {
        name: field.get_default(call_default_factory=True)
        for name, field in TrainConfig.model_fields.items()
        if not field.is_required()
    }
    tables = [
        {"dataset": _dataset(training), **(newer if training.settings else {}), **training.settings}
        for training in (side.training for side in sides)
    ]
    names = dict.fromkeys(name for table in tables for name in table if name not in OWN)
    rows = {name: tuple(table.get(name) for table in tables) for name in names}
    return {name: row for name, row in rows.items() if any(each != row[0] for each in row)}


def _dataset(training: Training) -> str | None:
    """The version that was trained on, as its folder is called."""
    if training.evaluation and training.evaluation.dataset_digest:
        return training.evaluation.dataset_digest[:12]
    data = str(training.settings.get("data", ""))
    return data.rstrip("/").rpartition("/")[2] or None


def _metrics(sides: Sequence[Side]) -> tuple[Metric, ...]:
    def row(name: str, figure: Callable[[Training], Figure | None], show: Any) -> Metric:
        return Metric(name, tuple(figure(side.training) for side in sides), show)

    def evaluated(field: str) -> Callable[[Training], Figure | None]:
        return lambda training: _figure(getattr(training.evaluation, field, None))

    rows = (
        row("accuracy", lambda training: _accuracy(training.evaluation), _percent),
        row("top5", evaluated("top5"), _percent),
        row("loss", evaluated("loss"), _short),
        row("macro_f1", evaluated("macro_f1"), _short),
        row("calibration_error", evaluated("calibration_error"), _short),
        row("samples", evaluated("samples"), _whole),
        row("step", lambda training: _figure(training.checkpoint), _whole),
        row("ranks", lambda t: _figure(_last(t.of("start"), "world_size")), _whole),
        row("images_per_s", _speed, _whole),
        row("training_seconds", _seconds, clock),
    )
    return tuple(each for each in rows if any(each.figures))


def _accuracy(found: Evaluation | None) -> Figure | None:
    return Figure(found.accuracy, found.accuracy_low, found.accuracy_high) if found else None


def _figure(value: Any) -> Figure | None:
    return Figure(value) if is_number(value) else None


def _last(events: Sequence[dict[str, Any]], key: str) -> Any:
    return events[-1].get(key) if events else None


def _speed(training: Training) -> Figure | None:
    """Median over the steps that reported it."""
    found = sorted(e["images_per_s"] for e in training.of("step") if "images_per_s" in e)
    return _figure(found[len(found) // 2]) if found else None


def _seconds(training: Training) -> Figure | None:
    """From the first event to the last, without the time between a stop and going on."""
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


def _whole(value: float) -> str:
    return f"{value:,.0f}"
