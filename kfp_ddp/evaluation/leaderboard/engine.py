"""The leaderboard step: folders of trainings in, the best of them and a table of all out."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kfp_ddp.core.errors import InputError, JobError
from kfp_ddp.core.step import step
from kfp_ddp.evaluation.leaderboard.trials import Trial, differing, ranked, read
from kfp_ddp.report.charts import COLOURS, Series, line_chart
from kfp_ddp.report.render import Card, render_page

if TYPE_CHECKING:
    from kfp import dsl

LONGEST = 60
"""Characters of a setting that a table shows."""


class Best(NamedTuple):
    """The checkpoint of the best training, and its folder."""

    checkpoint: str
    run_dir: str


@step
def run(
    run_dirs: Sequence[str],
    checkpoints: Sequence[str],
    failures: Sequence[str],
    sweep_report: "dsl.HTML",
    sweep_metrics: "dsl.Metrics",
    sweep_summary: "dsl.Markdown",
) -> Best:
    """Rank the trainings, and write what they came to.

    Raises:
        InputError: the lists do not belong together.
        JobError: every training failed.
    """
    if not len(run_dirs) == len(checkpoints) == len(failures) > 0:
        raise InputError(
            f"{len(run_dirs)} run_dirs, {len(checkpoints)} checkpoints and {len(failures)} "
            "failures: give those of the same trainings, at least one"
        )
    trials = ranked(read(*each) for each in zip(run_dirs, checkpoints, failures, strict=True))
    names, table = differing(trials), rows(trials)
    Path(sweep_report.path).write_text(html(trials, names, table), encoding="utf-8")
    Path(sweep_summary.path).write_text(markdown(names, table), encoding="utf-8")
    best, failed = trials[0], [trial for trial in trials if trial.failure]
    figures = {
        "trials": len(trials),
        "failed": len(failed),
        "ended_early": sum(bool(trial.ended) for trial in trials),
    }
    for name, value in figures.items():
        sweep_metrics.log_metric(name, value)
    if len(failed) == len(trials):
        raise JobError(f"all {len(trials)} trials failed; the first: {failed[0].failure}")
    sweep_metrics.log_metric("best_accuracy", round(best.accuracy, 6))
    settings = ", ".join(f"{name}={_value(best, name)}" for name in names)
    print(f"best of {len(trials)}: accuracy {best.accuracy:.4f} with {settings}")
    for trial in failed:
        print(f"failed: {trial.run_dir}: {trial.failure}")
    return Best(best.checkpoint, best.run_dir)


def rows(trials: Sequence[Trial]) -> list[list[str]]:
    """A row a trial: rank, settings, accuracy, loss, epochs, and how it ended."""
    names = differing(trials)
    return [
        [
            str(rank) if trial.checkpoint else "",
            *(_value(trial, name) for name in names),
            f"{trial.accuracy:.2%}" if trial.accuracy >= 0 else "",
            f"{trial.loss:.4f}" if trial.loss is not None and trial.checkpoint else "",
            f"{trial.epochs:g}",
            f"failed: {trial.failure}" if trial.failure else trial.ended or "done",
        ]
        for rank, trial in enumerate(trials, 1)
    ]


def _value(trial: Trial, name: str) -> str:
    found = trial.settings.get(name, "")
    text = f"{found:g}" if isinstance(found, float) else str(found)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def head(names: Sequence[str]) -> list[str]:
    """The columns of a table."""
    return ["", *names, "accuracy", "loss", "epochs", "ended"]


def markdown(names: Sequence[str], table: Sequence[Sequence[str]]) -> str:
    """The trials for the KFP UI."""
    from kfp_ddp.core.text import cell

    lines = [f"| {' | '.join(head(names))} |", f"|{'---|' * len(head(names))}"]
    lines += [f"| {' | '.join(map(cell, row))} |" for row in table]
    return "\n".join(lines) + "\n"


def html(trials: Sequence[Trial], names: Sequence[str], table: Sequence[Sequence[str]]) -> str:
    """A page of the trials and the curves of the best."""
    best = [trial for trial in trials if trial.curve][:COLOURS]
    curves = [Series(f"{rank}.", trial.curve, rank - 1) for rank, trial in enumerate(best, 1)]
    done = [trial for trial in trials if trial.checkpoint]
    headline = [
        Card("trials", str(len(trials))),
        Card("best accuracy", f"{done[0].accuracy:.2%}" if done else "none"),
        Card("ended early", str(sum(bool(trial.ended) for trial in trials))),
        Card("failed", str(sum(bool(trial.failure) for trial in trials))),
    ]
    return render_page(
        "leaderboard.html",
        title="Sweep",
        headline=headline,
        columns=head(names),
        rows=table,
        best=len(best),
        chart=line_chart("Validation accuracy", curves, "epoch", percent=True),
    )
