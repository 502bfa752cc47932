"""The leaderboard step: ranks the trainings of a sweep by their folders."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kfp_ddp.core.errors import InputError, JobError
from kfp_ddp.core.step import step
from kfp_ddp.core.text import cell
from kfp_ddp.report.charts import COLOURS, Series, line_chart
from kfp_ddp.report.events import Point, curve, is_number
from kfp_ddp.report.render import Card, render
from kfp_ddp.runs.record import read_task
from kfp_ddp.runs.workspace import open_workspace
from kfp_ddp.training.config import TrainConfig

if TYPE_CHECKING:
    from kfp import dsl

MAX_SETTING = 60
"""Characters of a setting in a table."""


@dataclass(frozen=True)
class Trial:
    """One training."""

    run_dir: str
    checkpoint: str
    """Empty if it failed."""
    failure: str
    settings: dict[str, Any]
    accuracy: float
    """Of the checkpoint, in the training's own evaluation; -1 if unknown."""
    loss: float | None
    epochs: float
    ended: str
    """Why it ended before its last epoch; empty if it did not."""
    curve: tuple[Point, ...]
    """Accuracy by epoch."""

    @property
    def rank(self) -> tuple[bool, float, float]:
        """Key of the order: by accuracy and then by loss, failed trials last."""
        loss = math.inf if self.loss is None else self.loss
        return not self.checkpoint, -self.accuracy, loss


@step
def run(
    run_dirs: Sequence[str],
    checkpoints: Sequence[str],
    failures: Sequence[str],
    sweep_report: "dsl.HTML",
    sweep_metrics: "dsl.Metrics",
    sweep_summary: "dsl.Markdown",
) -> tuple[str, str]:
    """Rank the trainings and write report, metrics and summary.

    Return checkpoint and folder of the best. Raise InputError if the lists differ in length,
    JobError if every training failed.
    """
    if not len(run_dirs) == len(checkpoints) == len(failures) > 0:
        raise InputError(
            f"{len(run_dirs)} run_dirs, {len(checkpoints)} checkpoints and {len(failures)} "
            "failures: give those of the same trainings, at least one"
        )
    inputs = zip(run_dirs, checkpoints, failures, strict=True)
    trials = sorted((read(*trial) for trial in inputs), key=lambda trial: trial.rank)
    configs = [trial.settings for trial in trials if trial.settings]
    names = [  # of the settings that differ
        name
        for name in TrainConfig.model_fields
        if name not in TrainConfig.set_by_step
        if len({json.dumps(config.get(name)) for config in configs}) > 1
    ]
    columns = ["", *names, "accuracy", "loss", "epochs", "ended"]
    rows = [_row(rank, trial, names) for rank, trial in enumerate(trials, 1)]
    Path(sweep_report.path).write_text(_html(trials, columns, rows), encoding="utf-8")
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    lines += [f"| {' | '.join(map(cell, row))} |" for row in rows]
    Path(sweep_summary.path).write_text("\n".join(lines) + "\n", encoding="utf-8")
    best, failed = trials[0], [trial for trial in trials if trial.failure]
    sweep_metrics.log_metric("trials", len(trials))
    sweep_metrics.log_metric("failed", len(failed))
    sweep_metrics.log_metric("ended_early", sum(bool(trial.ended) for trial in trials))
    if len(failed) == len(trials):
        raise JobError(f"all {len(trials)} trials failed; the first: {failed[0].failure}")
    sweep_metrics.log_metric("best_accuracy", round(best.accuracy, 6))
    settings = ", ".join(f"{name}={_setting(best, name)}" for name in names)
    print(f"best of {len(trials)}: accuracy {best.accuracy:.4f} with {settings}")
    for trial in failed:
        print(f"failed: {trial.run_dir}: {trial.failure}")
    return best.checkpoint, best.run_dir


def read(run_dir: str, checkpoint: str, failure: str) -> Trial:
    """Read a training from its folder; raise KfpDdpError if the folder cannot be read."""
    with open_workspace(run_dir, "leaderboard") as folder:
        record = read_task(folder.path)
    step = int(checkpoint.rpartition("-")[2] or -1) if checkpoint else -1
    evaluations = [event for event in record.select("eval") if event.get("step") == step]
    evaluation: dict[str, Any] = evaluations[-1] if evaluations else {}  # others were repeated
    ends = [event.get("reason") or "" for event in record.select("end")]
    points = curve(record.events, "eval", "accuracy")
    return Trial(
        run_dir=run_dir,
        checkpoint=checkpoint,
        failure=failure,
        settings=record.settings,
        accuracy=evaluation["accuracy"] if is_number(evaluation.get("accuracy")) else -1,
        loss=evaluation.get("loss"),
        epochs=points[-1][0] if points else 0.0,
        ended=ends[-1] if ends and not failure else "",
        curve=tuple(points),
    )


def _row(rank: int, trial: Trial, names: Sequence[str]) -> list[str]:
    return [
        str(rank) if trial.checkpoint else "",
        *(_setting(trial, name) for name in names),
        f"{trial.accuracy:.2%}" if trial.accuracy >= 0 else "",
        f"{trial.loss:.4f}" if trial.loss is not None and trial.checkpoint else "",
        f"{trial.epochs:g}",
        f"failed: {trial.failure}" if trial.failure else trial.ended or "done",
    ]


def _setting(trial: Trial, name: str) -> str:
    value = trial.settings.get(name, "")
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= MAX_SETTING else f"{text[: MAX_SETTING - 1]}…"


def _html(trials: Sequence[Trial], columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a page with the trials and the curves of the best."""
    best = [trial for trial in trials if trial.curve][:COLOURS]
    curves = [Series(f"{rank}.", trial.curve, rank - 1) for rank, trial in enumerate(best, 1)]
    successful = [trial for trial in trials if trial.checkpoint]
    headline = [
        Card("trials", str(len(trials))),
        Card("best accuracy", f"{successful[0].accuracy:.2%}" if successful else "none"),
        Card("ended early", str(sum(bool(trial.ended) for trial in trials))),
        Card("failed", str(sum(bool(trial.failure) for trial in trials))),
    ]
    return render(
        "leaderboard.html",
        title="Sweep",
        headline=headline,
        columns=columns,
        rows=rows,
        best=len(best),
        chart=line_chart("Validation accuracy", curves, percent=True),
    )
