"""The leaderboard of a sweep: the page, the table and the figures of its trials."""

import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kfp_ddp.core.errors import JobError
from kfp_ddp.core.log import log
from kfp_ddp.core.outputs import TuneFacts, TuneFigures
from kfp_ddp.core.step import Artifact, write_artifact
from kfp_ddp.core.text import cell
from kfp_ddp.report import charts
from kfp_ddp.report.charts import COLOURS, HEIGHT, Axis
from kfp_ddp.report.events import Point, curve, is_number
from kfp_ddp.report.render import Card, render
from kfp_ddp.runs.record import read_task
from kfp_ddp.runs.trials import TrialRecord, Trials, figure, setting_text
from kfp_ddp.runs.workspace import open_workspace
from kfp_ddp.sweep.study import Study, Trial
from kfp_ddp.training.spec.config import TrainConfig

if TYPE_CHECKING:
    from markupsafe import Markup

MOST_IN_KFP = 50
"""Trials in the metadata of the report, which KFP keeps in its database and in the step's log."""


class Training(NamedTuple):
    """The training of a trial, by the files in its folder."""

    settings: dict[str, Any]
    accuracy: float
    """Of the checkpoint, in the training's own evaluation; -1 if unknown."""
    loss: float
    """Infinite if unknown."""
    ended: str
    """Why it ended before its last epoch; empty if it did not."""
    hours: float
    """Of all ranks."""
    curve: Sequence[Point]
    """Accuracy by epoch."""

    @property
    def epochs(self) -> float:
        """Epochs until its last evaluation."""
        return self.curve[-1][0] if self.curve else 0.0


def read(run_dir: str, checkpoint: str) -> Training:
    """Read a training from its folder; raise KfpDdpError if the folder cannot be read."""
    with open_workspace(run_dir, "leaderboard") as folder:
        record = read_task(folder.path)
    evaluations = {event.get("step"): event for event in record.select("eval")}
    evaluation = evaluations.get(int(checkpoint.rpartition("-")[2] or -1), {})
    accuracy = evaluation.get("accuracy")
    loss = evaluation.get("loss")
    ends = [event.get("reason") or "" for event in record.select("end")]
    return Training(
        settings=record.settings,
        accuracy=accuracy if is_number(accuracy) else -1,
        loss=loss if is_number(loss) else math.inf,
        ended=ends[-1] if ends else "",
        hours=record.cost.gpu_hours,
        curve=curve(record.events, "eval", "accuracy"),
    )


class Leaderboard:
    """The page and the table of a study's trials; `place_of` returns the folder of a trial."""

    def __init__(
        self,
        study: Study,
        number: int,
        place_of: Callable[[Trial], str],
        report: Artifact,
        summary: Artifact,
    ) -> None:
        self.study = study
        self.number = number
        self.place_of = place_of
        self._report = report
        self._summary = summary
        self._read: dict[tuple[int, str, bool], Training] = {}

    def ranked(self) -> list[tuple[Trial, Training]]:
        """Return the trials by accuracy and then by loss, failed ones last."""

        def rank(pair: tuple[Trial, Training]) -> tuple[bool, bool, float, float]:
            trial, training = pair
            return trial.failed, not trial.checkpoint, -training.accuracy, training.loss

        return sorted(((trial, self._training(trial)) for trial in self.study.trials), key=rank)

    def _training(self, trial: Trial) -> Training:
        """Return the training of a trial, read again only if it changed."""
        key = (trial.number, trial.checkpoint, trial.failed)
        if trial.trains or key not in self._read:
            self._read[key] = read(self.place_of(trial), trial.checkpoint)
        return self._read[key]

    def best(self) -> Trial:
        """Return the best trial; raise JobError if all failed, or none was trained."""
        pairs = self.ranked()
        if not pairs:
            raise JobError(f"all 0 trials failed; the first: {self.study.spent}")
        trial, training = pairs[0]
        if trial.failed or not trial.checkpoint:
            raise JobError(f"all {len(pairs)} trials failed; the first: {trial.ended}")
        settings = ", ".join(f"{name}={value}" for name, value in trial.settings.items())
        log.info(f"best of {len(pairs)}: accuracy {training.accuracy:.4f} with {settings}")
        return trial

    def figures(self) -> TuneFigures:
        """Return the metrics of the sweep."""
        trials = self.study.trials
        figures: TuneFigures = {
            "trials": len(trials),
            "failed": sum(trial.failed for trial in trials),
            "ended_early": sum(map(_ended_early, trials)),
            "hours": round(sum(trial.hours for trial in trials), 4),
        }
        best = max(
            (training.accuracy for trial, training in self.ranked() if not trial.failed),
            default=-1,
        )
        if best >= 0:
            figures["best_accuracy"] = round(best, 6)
        return figures

    def show(self) -> Trials:
        """Write page and table, print the state in one line, and return the trials."""
        pairs = self.ranked()
        figures = self.figures()
        names = _different_settings(training for _, training in pairs)
        records = [self._record(rank, *pair, names) for rank, pair in enumerate(pairs, 1)]
        columns = ["", *names, "accuracy", "loss", "epochs", "hours", "ended"]
        rows = [_row(record, names) for record in records]
        write_artifact(self._summary, _markdown([columns, ["---"] * len(columns), *rows]))
        best = f"{figures['best_accuracy']:.2%}" if "best_accuracy" in figures else "none"
        train = sum(trial.trains for trial, _ in pairs)
        series = _series(training.curve for _, training in pairs if training.curve)
        known = [
            {**training.settings, "accuracy": training.accuracy}
            for _, training in pairs
            if training.accuracy >= 0
        ]
        page = render(
            "leaderboard.html",
            title="Sweep",
            headline=[
                Card("trials", str(len(pairs)), f"of at most {self.number}"),
                Card("best accuracy", best),
                Card("train now", str(train)),
                Card("ended early", str(figures["ended_early"])),
                Card("failed", str(figures["failed"])),
                Card("hours of all ranks", f"{figures['hours']:.2f}", self.study.spent),
            ],
            columns=columns,
            rows=rows,
            best=len(series),
            chart=charts.line_chart("Validation accuracy", series, percent=True),
            parallel=parallel(known, names),
        )
        best_ones = Trials(trials=tuple(records[:MOST_IN_KFP]))
        facts = TuneFacts(sweep=best_ones.model_dump(mode="json"))
        write_artifact(self._report, page, **facts)
        state = f"{len(pairs)} of at most {self.number} trials, {train} train"
        log.info(f"{state}, best accuracy {best}")
        return Trials(trials=tuple(records))

    def _record(
        self, rank: int, trial: Trial, training: Training, names: Sequence[str]
    ) -> TrialRecord:
        settings = {**trial.settings, **training.settings}
        ranked = trial.checkpoint and not trial.failed
        return TrialRecord(
            task=self.place_of(trial).rpartition("/")[2],
            rank=rank if ranked else 0,
            settings={
                name: settings[name] for name in (*trial.settings, *names) if name in settings
            },
            accuracy=training.accuracy if training.accuracy >= 0 else None,
            loss=training.loss if is_number(training.loss) else None,
            epochs=training.epochs,
            hours=trial.hours,
            state=_state(trial),
        )


def _ended_early(trial: Trial) -> bool:
    ended = bool(trial.ended) or trial.can_go_on
    return ended and not trial.failed


def _different_settings(trainings: Iterable[Training]) -> list[str]:
    """Return the names of the settings that are not the same in all trainings."""
    tables = [training.settings for training in trainings if training.settings]
    names = []
    for name in TrainConfig.model_fields:
        values = {json.dumps(table.get(name)) for table in tables}
        if len(values) > 1 and name not in TrainConfig.set_by_step:
            names.append(name)
    return names


def _markdown(rows: Iterable[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(map(cell, row))} |\n" for row in rows)


def _series(curves: Iterable[Sequence[Point]]) -> list[charts.Series]:
    """Return the first curves as lines of a chart, as many as it has colours for."""
    first = itertools.islice(curves, COLOURS)
    return [charts.Series(f"{rank + 1}.", points, rank) for rank, points in enumerate(first)]


def _row(record: TrialRecord, names: Sequence[str]) -> list[str]:
    return [
        str(record.rank or ""),
        *(setting_text(record.settings.get(name, "")) for name in names),
        figure(record.accuracy, ".2%"),
        figure(record.loss, ".4f"),
        f"{record.epochs:g}",
        f"{record.hours:.2f}",
        record.state,
    ]


def _state(trial: Trial) -> str:
    """Return whether a trial trains, waits, or why and how it ended."""
    if trial.trains:
        return f"trains to epoch {trial.rungs[trial.level]}"
    if trial.can_go_on:
        return f"ended at epoch {trial.rungs[trial.level]}"
    return f"failed: {trial.ended}" if trial.failed else trial.ended or "done"


def parallel(trials: Sequence[Mapping[str, Any]], names: Sequence[str]) -> "Markup | str":
    """Return a chart of parallel coordinates: an axis for each setting, and one for the accuracy.

    A line is a trial, the best first. An axis of numbers over a power of ten is logarithmic.
    """
    if len(trials) < 2 or not names:
        return ""
    axes = {name: _scaled([trial.get(name) for trial in trials]) for name in (*names, "accuracy")}
    ticks = [
        (float(index), f"{name}: {ends}") for index, (name, (ends, _)) in enumerate(axes.items())
    ]
    across = Axis(0, len(names), ticks)
    up = Axis(0, 1, [])
    shapes = [charts.Shape(f"M{across.x(index):.1f} 0V{HEIGHT}", "mark") for index, _ in ticks]
    # The best line is drawn last, above the others.
    for rank, trial in reversed([*enumerate(trials)]):
        points = [
            f"{across.x(index):.1f} {up.y(shares[rank]):.1f}"
            for index, (_, shares) in enumerate(axes.values())
        ]
        settings = ", ".join(f"{name}={setting_text(trial.get(name))}" for name in names)
        title = f"{rank + 1}. {settings}: {trial['accuracy']:.2%}"
        has_colour = rank < COLOURS
        kind = "curve" if has_colour else "rest"
        colour = rank if has_colour else None
        shapes.append(charts.Shape(f"M{'L'.join(points)}", kind, colour, title=title))
    keys = [charts.LegendEntry(f"{rank + 1}.", rank) for rank in range(min(COLOURS, len(trials)))]
    label = f"Settings and accuracy of {len(trials)} trials"
    return charts.plot(
        "Settings and accuracy", across, up, "each line is a trial", shapes, keys, label
    )


def _is_on_a_scale(value: Any) -> bool:
    return is_number(value) and not isinstance(value, bool)


def _scaled(values: Sequence[Any]) -> tuple[str, list[float]]:
    """Return the ends of an axis, as text, and the share of each value on it."""
    if not all(map(_is_on_a_scale, values)):
        different = list(dict.fromkeys(map(setting_text, values)))
        last = max(1, len(different) - 1)
        return ", ".join(different), [
            different.index(setting_text(value)) / last for value in values
        ]
    low = min(values)
    high = max(values)
    if low == high:
        return f"{low:g}", [0.5 for _ in values]
    axis = Axis(low, high, [], log=0 < low < high / 10)
    return f"{low:g} to {high:g}", [axis.share(value) for value in values]
