"""The `tune` step: trains trials, several at a time, and returns the best."""

from collections.abc import Mapping
from functools import cache, partial
from typing import Any

from kfp_ddp.core import folders
from kfp_ddp.core.errors import InputError, JobError, StorageError
from kfp_ddp.core.log import log
from kfp_ddp.core.run_folder import task_folder, task_title
from kfp_ddp.core.step import step
from kfp_ddp.jobs.ending import handling_all
from kfp_ddp.models import weights_download
from kfp_ddp.plan.form import Parameters
from kfp_ddp.plan.settings import training_fields, trial_config
from kfp_ddp.plan.sweep import Sweep, number_of
from kfp_ddp.runs.train.engine import Finished, Trained, train, write_outputs
from kfp_ddp.runs.training_folder import followed_folder
from kfp_ddp.runs.workspace import create_run_folder, open_workspace
from kfp_ddp.sweep.leaderboard import Leaderboard, read
from kfp_ddp.sweep.study import Result, Study, Trial, search

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
    settings = Sweep.create(**sweep)
    work = folders.work_dir(work_dir)
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
        log.info(f"trial {trial.number} trains to epoch {epochs}: {trial.settings}")
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
            log.info(f"trial {trial.number} failed: {error}")
            return Result(hours=read(place_of(trial), "").hours, ended=str(error))
        row = read(ended.place, checkpoint)
        early = row.epochs < epochs
        return Result(row.accuracy, checkpoint, row.hours, row.ended if early else "")

    place = create_run_folder(work, run_id, task_title(task_name, ""))
    with open_workspace(place, "sweep") as folder:
        study = Study(folder.path / JOURNAL, settings, configure)
        board = Leaderboard(study, number, place_of, sweep_report, sweep_summary)

        def show() -> None:
            try:
                board.show().write(folder.path)
                folder.upload()
            except StorageError as error:  # the next time may succeed, and the end uploads all
                log.warning(f"{error}")

        with handling_all():
            search(study, train_to_level, at_once, show)
        for name, value in board.figures().items():
            sweep_metrics.log_metric(name, value)
        best = board.best()
    if best.number not in finished:  # an earlier process trained it
        with followed_folder(place_of(best)) as (run_dir, _):
            finished[best.number] = Finished(run_dir, place_of(best), "", {"kfp_ddp": {}})
    return write_outputs(finished[best.number], trained_model, train_metrics, loss_curve)
