"""The `tune` step: trains trials, several at a time, and returns the best."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from kfp_ddp.core import folders
from kfp_ddp.core.errors import InputError, JobError, StorageError
from kfp_ddp.core.run_folder import task_folder, task_title
from kfp_ddp.core.step import Artifact, step, write_artifact
from kfp_ddp.core.text import cell
from kfp_ddp.jobs.ending import handling_all
from kfp_ddp.models import weights_download
from kfp_ddp.plan.form import Parameters
from kfp_ddp.plan.settings import training_fields, trial_config
from kfp_ddp.plan.sweep import Sweep, number_of
from kfp_ddp.report import charts
from kfp_ddp.report.charts import COLOURS, HEIGHT, Axis
from kfp_ddp.report.events import Point, curve, is_number
from kfp_ddp.report.render import Card, render
from kfp_ddp.runs.record import read_task
from kfp_ddp.runs.train.engine import Finished, Trained, train, write_outputs
from kfp_ddp.runs.training_folder import followed_folder
from kfp_ddp.runs.workspace import create_run_folder, open_workspace
from kfp_ddp.sweep.study import Result, Study, Trial, search
from kfp_ddp.training.spec.config import TrainConfig

if TYPE_CHECKING:
    from markupsafe import Markup

MAX_SETTING = 60
"""Characters of a setting in a table."""


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
    accuracy, loss = evaluation.get("accuracy"), evaluation.get("loss")
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
        self.study, self.number, self.place_of = study, number, place_of
        self._report, self._summary = report, summary
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
        if not pairs or not pairs[0][0].checkpoint or pairs[0][0].failed:
            first = pairs[0][0].ended if pairs else self.study.spent
            raise JobError(f"all {len(pairs)} trials failed; the first: {first}")
        trial, training = pairs[0]
        settings = ", ".join(f"{name}={value}" for name, value in trial.settings.items())
        print(f"best of {len(pairs)}: accuracy {training.accuracy:.4f} with {settings}")
        return trial

    def figures(self) -> dict[str, float]:
        """Return the metrics of the sweep."""
        trials = self.study.trials
        best = max((one.accuracy for trial, one in self.ranked() if not trial.failed), default=-1)
        return {
            "trials": len(trials),
            "failed": sum(trial.failed for trial in trials),
            "ended_early": sum(
                not trial.failed and (bool(trial.ended) or trial.can_go_on) for trial in trials
            ),
            "hours": round(sum(trial.hours for trial in trials), 4),
            **({"best_accuracy": round(best, 6)} if best >= 0 else {}),
        }

    def show(self) -> None:
        """Write page and table, and print the state in one line."""
        pairs, figures = self.ranked(), self.figures()
        names = [  # of the settings that differ
            name
            for name in TrainConfig.model_fields
            if name not in TrainConfig.set_by_step
            if len({json.dumps(one.settings.get(name)) for _, one in pairs if one.settings}) > 1
        ]
        columns = ["", *names, "accuracy", "loss", "epochs", "hours", "ended"]
        rows = [_row(rank, *pair, names) for rank, pair in enumerate(pairs, 1)]
        table = (map(cell, row) for row in [columns, ["---"] * len(columns), *rows])
        write_artifact(self._summary, "".join(f"| {' | '.join(row)} |\n" for row in table))
        best = f"{figures['best_accuracy']:.2%}" if "best_accuracy" in figures else "none"
        train = sum(trial.trains for trial, _ in pairs)
        curves = [one.curve for _, one in pairs if one.curve][:COLOURS]
        series = [charts.Series(f"{rank + 1}.", points, rank) for rank, points in enumerate(curves)]
        known = [{**t.settings, "accuracy": t.accuracy} for _, t in pairs if t.accuracy >= 0]
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
        write_artifact(self._report, page)
        state = f"{len(pairs)} of at most {self.number} trials, {train} train"
        print(f"{state}, best accuracy {best}", flush=True)


def _row(rank: int, trial: Trial, training: Training, names: Sequence[str]) -> list[str]:
    accuracy, loss = training.accuracy, training.loss
    state = f"failed: {trial.ended}" if trial.failed else trial.ended or "done"
    if trial.trains or trial.can_go_on:
        state = f"{'trains to' if trial.trains else 'ended at'} epoch {trial.rungs[trial.level]}"
    return [
        str(rank) if trial.checkpoint and not trial.failed else "",
        *(_setting({**trial.settings, **training.settings}.get(name, "")) for name in names),
        f"{accuracy:.2%}" if accuracy >= 0 else "",
        f"{loss:.4f}" if is_number(loss) else "",
        f"{training.epochs:g}",
        f"{trial.hours:.2f}",
        state,
    ]


def _setting(value: Any) -> str:
    return charts.shorten(f"{value:g}" if isinstance(value, float) else str(value), MAX_SETTING)


def parallel(trials: Sequence[Mapping[str, Any]], names: Sequence[str]) -> "Markup | str":
    """Return a chart of parallel coordinates: an axis for each setting, and one for the accuracy.

    A line is a trial, the best first. An axis of numbers over a power of ten is logarithmic.
    """
    if len(trials) < 2 or not names:
        return ""
    scaled = {name: _scaled([trial.get(name) for trial in trials]) for name in (*names, "accuracy")}
    ticks = [(float(at), f"{name}: {ends}") for at, (name, (ends, _)) in enumerate(scaled.items())]
    across, up = Axis(0, len(names), ticks), Axis(0, 1, [])
    shapes = [charts.Shape(f"M{across.x(at):.1f} 0V{HEIGHT}", "mark") for at, _ in ticks]
    for rank, trial in reversed([*enumerate(trials)]):
        shares = [shares[rank] for _, shares in scaled.values()]
        points = [f"{across.x(at):.1f} {up.y(share):.1f}" for at, share in enumerate(shares)]
        settings = ", ".join(f"{name}={_setting(trial.get(name))}" for name in names)
        title = f"{rank + 1}. {settings}: {trial['accuracy']:.2%}"
        kind, colour = ("curve", rank) if rank < COLOURS else ("rest", None)
        shapes.append(charts.Shape(f"M{'L'.join(points)}", kind, colour, title=title))
    keys = [charts.LegendEntry(f"{rank + 1}.", rank) for rank in range(min(COLOURS, len(trials)))]
    label = f"Settings and accuracy of {len(trials)} trials"
    return charts.plot(
        "Settings and accuracy", across, up, "each line is a trial", shapes, keys, label
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


JOURNAL = "study.jsonl"
"""In the folder of the step."""


@step
def run(
    run_id: str,
    task_name: str,
    sweep: Mapping[str, Any],
    training: Mapping[str, Any],
    backend: str,
    job: Mapping[str, Any],
    image: str,
    work_dir: str,
    trained_model: Any,
    train_metrics: Any,
    loss_curve: Any,
    sweep_report: Any,
    sweep_metrics: Any,
    sweep_summary: Any,
    **inputs: Any,
) -> Trained:
    """Train the trials; the inputs are those of the component.

    A step that was interrupted continues: finished trainings are in its journal, jobs are adopted.
    InputError is raised before any training, JobError if all trials failed.
    """
    settings, work = Sweep.create(**sweep), folders.work_dir(work_dir)
    number = number_of(settings)
    own_image = {"image": job["image"]} if job.get("image", image) != image else {}
    form = Parameters.create(source="/", recipe=settings.recipe, training=training, job=own_image)
    find = cache(weights_download.find)
    configure = partial(trial_config, settings, parameters=form, inputs={}, find=find)
    at_once = 0 if backend == "local" else settings.parallel_trials
    finished = dict[int, Finished]()

    def place_of(trial: Trial) -> str:
        return task_folder(work, run_id, task_title(task_name, str(trial.number)))

    def train_to_level(trial: Trial) -> Result:
        epochs = trial.rungs[trial.level]
        print(f"trial {trial.number} trains to epoch {epochs}: {trial.settings}", flush=True)
        try:
            ended = finished[trial.number] = train(
                run_id=run_id,
                task_name=task_name,
                task_id=str(trial.number),
                training=training_fields(configure(trial.settings)),
                backend=backend,
                job=job,
                image=image,
                work_dir=work_dir,
                stop_epochs=epochs,
                **inputs,
            )
            _, checkpoint = ended.chosen()
        except (InputError, JobError) as error:
            print(f"trial {trial.number} failed: {error}", flush=True)
            return Result(hours=read(place_of(trial), "").hours, ended=str(error))
        row = read(ended.place, checkpoint)
        return Result(row.accuracy, checkpoint, row.hours, row.ended if row.epochs < epochs else "")

    place = create_run_folder(work, run_id, task_title(task_name, ""))
    with open_workspace(place, "sweep") as folder:
        study = Study(folder.path / JOURNAL, settings, configure)
        board = Leaderboard(study, number, place_of, sweep_report, sweep_summary)

        def show() -> None:
            try:
                board.show()
                folder.upload()
            except StorageError as error:  # the next time may succeed, and the end uploads all
                print(f"warning: {error}", flush=True)

        with handling_all():
            search(study, train_to_level, at_once, show)
        for name, value in board.figures().items():
            sweep_metrics.log_metric(name, value)
        best = board.best()
    if best.number not in finished:  # an earlier process trained it
        with followed_folder(place_of(best)) as (run_dir, _):
            finished[best.number] = Finished(run_dir, place_of(best), "", {"kfp_ddp": {}})
    return write_outputs(finished[best.number], trained_model, train_metrics, loss_curve)
