"""The leaderboard of a sweep: its trials by accuracy, as far as they are."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kfp_ddp.core.errors import JobError
from kfp_ddp.core.text import cell
from kfp_ddp.report.charts import COLOURS, Axis, LegendEntry, Series, Shape, line_chart, plot
from kfp_ddp.report.charts import HEIGHT as BOTTOM
from kfp_ddp.report.events import Point, curve, is_number, training_time
from kfp_ddp.report.render import Card, render
from kfp_ddp.runs.record import read_task
from kfp_ddp.runs.workspace import open_workspace
from kfp_ddp.sweep.study import Study, Trial
from kfp_ddp.training.config import TrainConfig

if TYPE_CHECKING:
    from kfp import dsl
    from markupsafe import Markup

MAX_SETTING = 60
"""Characters of a setting in a table."""


@dataclass(frozen=True)
class Training:
    """The training of a trial, by the files in its folder."""

    settings: dict[str, Any]
    accuracy: float
    """Of the checkpoint, in the training's own evaluation; -1 if unknown."""
    loss: float | None
    epochs: float
    ended: str
    """Why it ended before its last epoch; empty if it did not."""
    hours: float
    """Of all ranks."""
    curve: tuple[Point, ...]
    """Accuracy by epoch."""


def read(run_dir: str, checkpoint: str) -> Training:
    """Read a training from its folder; raise KfpDdpError if the folder cannot be read."""
    with open_workspace(run_dir, "leaderboard") as folder:
        record = read_task(folder.path)
    step = int(checkpoint.rpartition("-")[2] or -1) if checkpoint else -1
    evaluations = [event for event in record.select("eval") if event.get("step") == step]
    evaluation: dict[str, Any] = evaluations[-1] if evaluations else {}  # others were repeated
    ends = [event.get("reason") or "" for event in record.select("end")]
    ranks = [start.get("world_size") for start in record.select("start")]
    points = curve(record.events, "eval", "accuracy")
    return Training(
        settings=record.settings,
        accuracy=evaluation["accuracy"] if is_number(evaluation.get("accuracy")) else -1,
        loss=evaluation.get("loss"),
        epochs=points[-1][0] if points else 0.0,
        ended=ends[-1] if ends else "",
        hours=training_time(record.events)[0] * max(filter(is_number, ranks), default=0) / 3600,
        curve=tuple(points),
    )


class Leaderboard:
    """The page and the table of a study's trials; `place_of` returns the folder of a trial."""

    def __init__(
        self,
        study: Study,
        number: int,
        place_of: Callable[[Trial], str],
        report: "dsl.HTML",
        summary: "dsl.Markdown",
    ) -> None:
        self.study, self.number, self.place_of = study, number, place_of
        self._report, self._summary = Path(report.path), Path(summary.path)
        self._read: dict[int, tuple[object, Training]] = {}

    def ranked(self) -> list[tuple[Trial, Training]]:
        """Return the trials by accuracy and then by loss, failed ones last."""
        pairs = [(trial, self._training(trial)) for trial in self.study.trials]

        def rank(pair: tuple[Trial, Training]) -> tuple[bool, bool, float, float]:
            trial, training = pair
            loss = math.inf if training.loss is None else training.loss
            return trial.failed, not trial.checkpoint, -training.accuracy, loss

        return sorted(pairs, key=rank)

    def _training(self, trial: Trial) -> Training:
        """Return the training of a trial, read again only if it changed."""
        state = (trial.checkpoint, trial.failed)
        known = self._read.get(trial.number)
        if known is None or known[0] != state or trial.trains:
            known = (state, read(self.place_of(trial), trial.checkpoint))
            self._read[trial.number] = known
        return known[1]

    def best(self) -> Trial:
        """Return the best trial; raise JobError if all failed, or none was trained."""
        pairs = self.ranked()
        if not pairs or not pairs[0][0].checkpoint or pairs[0][0].failed:
            first = pairs[0][0].ended if pairs else self.study.spent
            raise JobError(f"all {len(pairs)} trials failed; the first: {first}")
        settings = ", ".join(f"{name}={value}" for name, value in pairs[0][0].settings.items())
        print(f"best of {len(pairs)}: accuracy {pairs[0][1].accuracy:.4f} with {settings}")
        return pairs[0][0]

    def figures(self) -> dict[str, float]:
        """Return the metrics of the sweep."""
        trials = self.study.trials
        best = [training.accuracy for trial, training in self.ranked() if not trial.failed]
        return {
            "trials": len(trials),
            "failed": sum(trial.failed for trial in trials),
            "ended_early": sum(bool(trial.ended) or trial.can_go_on for trial in trials)
            - sum(trial.failed for trial in trials),
            "hours": round(sum(trial.hours for trial in trials), 4),
            **({"best_accuracy": round(best[0], 6)} if best and best[0] >= 0 else {}),
        }

    def show(self) -> None:
        """Write page and table, and print the state in one line."""
        pairs, figures = self.ranked(), self.figures()
        configs = [training.settings for _, training in pairs if training.settings]
        names = [  # of the settings that differ
            name
            for name in TrainConfig.model_fields
            if name not in TrainConfig.set_by_step
            if len({json.dumps(config.get(name)) for config in configs}) > 1
        ]
        columns = ["", *names, "accuracy", "loss", "epochs", "hours", "ended"]
        rows = [
            _row(rank, trial, training, names) for rank, (trial, training) in enumerate(pairs, 1)
        ]
        self._report.parent.mkdir(parents=True, exist_ok=True)
        self._report.write_text(self._html(pairs, names, columns, rows), encoding="utf-8")
        lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
        lines += [f"| {' | '.join(map(cell, row))} |" for row in rows]
        self._summary.write_text("\n".join(lines) + "\n", encoding="utf-8")
        trains = sum(trial.trains for trial in self.study.trials)
        best = (
            f", best accuracy {figures['best_accuracy']:.2%}" if "best_accuracy" in figures else ""
        )
        print(f"{len(pairs)} of at most {self.number} trials, {trains} train{best}", flush=True)

    def _html(
        self,
        pairs: Sequence[tuple[Trial, Training]],
        names: Sequence[str],
        columns: Sequence[str],
        rows: Sequence[Sequence[str]],
    ) -> str:
        figures = self.figures()
        best = [training for _, training in pairs if training.curve][:COLOURS]
        curves = [Series(f"{rank}.", one.curve, rank - 1) for rank, one in enumerate(best, 1)]
        accuracy = f"{figures['best_accuracy']:.2%}" if "best_accuracy" in figures else "none"
        headline = [
            Card("trials", str(len(pairs)), f"of at most {self.number}"),
            Card("best accuracy", accuracy),
            Card("train now", str(sum(trial.trains for trial, _ in pairs))),
            Card("ended early", f"{figures['ended_early']:.0f}"),
            Card("failed", f"{figures['failed']:.0f}"),
            Card("hours of all ranks", f"{figures['hours']:.2f}", self.study.spent),
        ]
        return render(
            "leaderboard.html",
            title="Sweep",
            headline=headline,
            columns=columns,
            rows=rows,
            best=len(best),
            chart=line_chart("Validation accuracy", curves, percent=True),
            parallel=parallel(
                [(t.settings, t.accuracy) for _, t in pairs if t.accuracy >= 0], names
            ),
        )


def _row(rank: int, trial: Trial, training: Training, names: Sequence[str]) -> list[str]:
    accuracy, loss = training.accuracy, training.loss
    if trial.trains or trial.can_go_on:
        state = f"{'trains to' if trial.trains else 'ended at'} epoch {trial.rungs[trial.level]}"
    else:
        state = trial.ended or "done"
    return [
        str(rank) if trial.checkpoint and not trial.failed else "",
        *(_setting({**trial.settings, **training.settings}.get(name, "")) for name in names),
        f"{accuracy:.2%}" if accuracy >= 0 else "",
        f"{loss:.4f}" if loss is not None and trial.checkpoint else "",
        f"{training.epochs:g}",
        f"{trial.hours:.2f}",
        f"failed: {trial.ended}" if trial.failed else state,
    ]


def _setting(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= MAX_SETTING else f"{text[: MAX_SETTING - 1]}…"


def parallel(
    trials: Sequence[tuple[dict[str, Any], float]], names: Sequence[str]
) -> "Markup | str":
    """Return a chart of parallel coordinates: an axis for each setting, and one for the accuracy.

    A line is a trial, the best first. An axis of numbers over a power of ten is logarithmic.
    """
    if len(trials) < 2 or not names:
        return ""
    columns = [[settings.get(name) for settings, _ in trials] for name in names]
    columns.append([accuracy for _, accuracy in trials])
    scaled = [_scaled(values) for values in columns]
    across = Axis(
        0,
        len(names),
        [
            (at, f"{name}: {ends}")
            for at, (name, (ends, _)) in enumerate(zip([*names, "accuracy"], scaled, strict=True))
        ],
    )
    up = Axis(0, 1, [])
    shapes = [Shape(f"M{across.x(at):.1f} 0V{BOTTOM}", "mark") for at in range(len(scaled))]
    for rank in reversed(range(len(trials))):
        points = (
            f"{across.x(at):.1f} {up.y(shares[rank]):.1f}" for at, (_, shares) in enumerate(scaled)
        )
        settings = ", ".join(f"{name}={_setting(trials[rank][0].get(name))}" for name in names)
        title = f"{rank + 1}. {settings}: {trials[rank][1]:.2%}"
        colour = rank if rank < COLOURS else None
        kind = "curve" if colour is not None else "rest"
        shapes.append(Shape(f"M{'L'.join(points)}", kind, colour, title=title))
    keys = [LegendEntry(f"{rank + 1}.", rank) for rank in range(min(COLOURS, len(trials)))]
    title = "Settings and accuracy"
    return plot(
        title, across, up, "each line is a trial", shapes, keys, f"{title} of {len(trials)} trials"
    )


def _scaled(values: Sequence[Any]) -> tuple[str, list[float]]:
    """Return the ends of an axis, as text, and the share of each value on it."""
    if not all(is_number(value) and not isinstance(value, bool) for value in values):
        different = list(dict.fromkeys(map(_setting, values)))
        last = max(1, len(different) - 1)
        return ", ".join(different), [different.index(_setting(value)) / last for value in values]
    low, high = min(values), max(values)
    if low == high:
        return f"{low:g}", [0.5 for _ in values]
    axis = Axis(low, high, [], log=0 < low < high / 10)
    return f"{low:g} to {high:g}", [axis.share(value) for value in values]
