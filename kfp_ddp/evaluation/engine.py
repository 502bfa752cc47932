"""The evaluate step: checkpoint and split in, `evaluation.json`, report and artifacts out."""

import json
import math
import tempfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kfp_ddp.core import folders
from kfp_ddp.core.errors import InputError, JobError, RunCancelledError
from kfp_ddp.core.failure import read
from kfp_ddp.core.log import log
from kfp_ddp.core.outputs import PredictFacts, Warnings
from kfp_ddp.core.run_folder import RunFolder
from kfp_ddp.core.settings import split as split_fields
from kfp_ddp.core.step import Artifact, step, write_artifact
from kfp_ddp.core.text import cell, unexpanded
from kfp_ddp.datasets.access import using
from kfp_ddp.evaluation import results
from kfp_ddp.evaluation.bulk import Table, describe_drift
from kfp_ddp.evaluation.ranks import Evaluated, evaluate_share, with_local_folders
from kfp_ddp.evaluation.request import EvaluationRequest, Measuring, PredictionRequest, RankRequest
from kfp_ddp.jobs.launch_spec import SET_BY_STEP, LaunchSpec, check_backend
from kfp_ddp.jobs.local import EVALUATION, local_gpus, run_ranks
from kfp_ddp.jobs.run import launch
from kfp_ddp.jobs.shipping.own_package import on_workers
from kfp_ddp.jobs.task import with_folders, with_task_config
from kfp_ddp.k8s.api import COMPUTE_HERE, Api
from kfp_ddp.models.evaluation import FILE, Evaluation, figures_for
from kfp_ddp.report.summary import markdown
from kfp_ddp.runs.training_folder import followed_folder
from kfp_ddp.runs.workspace import RunWorkspace, create_run_folder, open_workspace
from kfp_ddp.training.report import trackers

if TYPE_CHECKING:
    from kfp_ddp.evaluation.roc import Roc

CHARTED_CLASSES = 50  # the KFP UI draws a cell 700 / N pixels wide
DIGESTS = ("dataset_digest", "checkpoint_digest")
"""Fields that the MLflow run of the training gets."""


@step
def run(
    *,
    run_dir: str,
    dataset_path: str,
    options: Mapping[str, Any],
    run_id: str,
    task_name: str,
    task_id: str,
    work_dir: str,
    backend: str,
    job: Mapping[str, Any],
    image: str,
    task_config: Any,
    evaluation_metrics: Any,
    confusion_matrix: Any,
    evaluation_report: Artifact,
    evaluation_summary: Artifact,
    **inputs: Any,
) -> tuple[float, str]:
    """Evaluate, fill the artifacts, and return the accuracy and the path of `evaluation.json`.

    `inputs` are fields of EvaluationRequest.
    """
    fields = job_fields(job, image, backend)
    request = EvaluationRequest.create(
        **inputs,
        of_run=bool(run_dir) and not options.get("network"),
        run_dir=run_dir or create_run_folder(folders.work_dir(work_dir), run_id, "evaluate"),
        data=dataset_path,
        options=Measuring.create(**options),
    )
    if backend != "local":
        with using("evaluate", request.run_dir, dataset_path):
            ids = (run_id, task_name, task_id)
            run_job(request, fields, task_config, backend, ids, (dataset_path, request.run_dir))
    with open_workspace(request.run_dir, "evaluate") as folder:
        target = RunFolder(folder.path).evaluation(request.split)
        if backend == "local":
            evaluate_locally(request, folder, int(fields.get("nproc_per_node", 0)))
        else:
            folder.download_below(f"{target.name}/")
        evaluated = Evaluated.read(target)
        result = evaluated.result
        tracked = [figure.name for figure in figures_for("mlflow")]
        metrics = {f"evaluation/{name}": getattr(result, name) for name in tracked}
        digests = {f"kfp_ddp.{name}": getattr(result, name) for name in DIGESTS}
        warning = trackers.note(folder.path, metrics, digests)
        evaluation = folder.to_uri(target / FILE)
    log_metrics(result, evaluation_metrics)
    write_artifact(evaluation_metrics, result.model_dump_json())
    log_charts(result, evaluated.roc, confusion_matrix)
    write_artifact(evaluation_report, evaluated.document)
    summary = f"{markdown(result, evaluated.test)}\n{cell(warning)}\n"
    write_artifact(evaluation_summary, summary, **Warnings(warnings=warning))
    log.info(
        f"accuracy {result.accuracy:.4f} on {result.samples} samples in {result.seconds:.1f} s"
    )
    if (test := evaluated.test) is not None:
        log_metrics(test, evaluation_metrics, "test_")
        log.info(f"accuracy {test.accuracy:.4f} on {test.samples} samples of test")
    return result.accuracy, evaluation


def evaluate_locally(request: EvaluationRequest, folder: RunWorkspace, ranks: int) -> None:
    """Evaluate with `ranks` processes of this step; 0 for one for each GPU."""
    with with_local_folders(request, folder) as local:
        if (ranks := local_gpus(ranks)) == 1:
            evaluate_share(local)
            return
        results.prepare(local.target, RunFolder(local.run_dir).path)
        _run_processes(local.changed(output_dir=str(local.target)), ranks, "evaluation")


def log_metrics(result: Evaluation, metrics: Any, prefix: str = "") -> None:
    """Fill a Metrics artifact. Other than finite numbers make the output unreadable."""
    for figure in figures_for("kfp"):
        value = getattr(result, figure.name)
        if value is not None and math.isfinite(value):
            metrics.log_metric(prefix + figure.name, round(float(value), 6))


def log_charts(result: Evaluation, roc: "Roc | None", chart: Any) -> None:
    """Fill a ClassificationMetrics artifact, unless there are too many classes to show."""
    if result.confusion is None or len(result.classes) > CHARTED_CLASSES:
        return
    chart.log_confusion_matrix([c.name for c in result.classes], result.confusion)
    if roc is not None:
        chart.log_roc_curve(roc.false_positive_rate, roc.true_positive_rate, roc.threshold)


def job_fields(job: Mapping[str, Any], image: str, backend: str) -> dict[str, Any]:
    """Return the fields of LaunchSpec from a step's inputs; InputError names an invalid one."""
    (inputs,) = split_fields("job", job, LaunchSpec, reserved=SET_BY_STEP)
    fields = {"image": image, **inputs}
    check_backend(backend, int(fields.get("nodes", 1)))
    LaunchSpec.create(**{**fields, "kind": "pytorchjob" if backend == "local" else backend})
    return fields


def _run_processes(request: RankRequest, ranks: int, what: str) -> None:
    """Compute with processes of this step; their logs are in the output folder."""
    folder = RunFolder(request.output_dir)
    log.info(f"{what}: {ranks} ranks, output in {folder.path}")
    ended = run_ranks(request.to_argv(), ranks, folder.path, EVALUATION)
    if ended.cancelled:
        raise RunCancelledError(f"the {what} was stopped; run it again to restart it")
    if ended.code:
        failure = read(folder.logs)
        if failure is not None and failure.exit_code == InputError.exit_code:
            raise InputError(failure.error)
        raise JobError(f"{what} failed: {ended.cause(folder.path)}")


def run_job(
    request: RankRequest,
    fields: dict[str, Any],
    task_config: Any,
    backend: str,
    ids: tuple[str, str, str],
    paths: tuple[str, str],
) -> None:
    """Compute with a job; `fields` are of LaunchSpec, `ids` of run, task and iteration.

    `paths` are what the ranks read, and the folder of the run.
    """
    api = Api.connect(otherwise=COMPUTE_HERE)
    fields = with_task_config(task_config, {**fields, "kind": backend})
    fields = with_folders(api, fields, *paths, ids[1])
    command = ["python3", "-m", EVALUATION, "--", *map(unexpanded, request.to_argv())]
    with followed_folder(paths[1]) as (folder, _):
        launch(LaunchSpec.create(**on_workers(fields, command)), *ids, api, folder)


@step
def predict(
    source: str,
    bundle: str,
    table: str,
    options: Mapping[str, Any],
    backend: str,
    job: Mapping[str, Any],
    image: str,
    task_config: Any,
    prediction_metrics: Any,
    prediction_record: Artifact,
    **ids: str,
) -> tuple[str, int, int]:
    """Predict, fill the artifacts, and return the table, its rows, and those unreadable."""
    fields = job_fields(job, image, backend)
    target = Table(table)
    request = PredictionRequest.from_inputs(source, bundle, table, options)
    if backend != "local":
        if not target.store.remote:
            raise InputError(f"table={table!r} is not in a bucket, to which each pod could write")
        paths = (source, f"{target.store.uri}/{target.parts}run")
        run = (ids["run_id"], ids["task_name"], ids["task_id"])
        run_job(request, fields, task_config, backend, run, paths)
        target.delete_parts()
    elif (ranks := local_gpus(int(fields.get("nproc_per_node", 0)))) > 1:
        with tempfile.TemporaryDirectory() as logs:
            _run_processes(request.changed(output_dir=logs), ranks, "prediction")
    else:
        from kfp_ddp.evaluation.bulk_rank import predict_share

        predict_share(request)
    record = target.read_record()
    for name in ("rows", "unreadable", "unsure", "computed", "seconds"):
        prediction_metrics.log_metric(name, record[name])
    for artifact in (prediction_metrics, prediction_record):
        write_artifact(artifact, json.dumps(record, indent=1))
    log.info(f"{record['rows']:,} rows, {record['computed']:,} new, in {table}")
    if drift := record["drift"]:
        for name in ("p_value", "distance"):
            prediction_metrics.log_metric(f"drift_{name}", drift[name])
        figures, words = describe_drift(drift)
        log.info(f"{figures}; {words}")
        prediction_record.metadata.update(PredictFacts(drift=words))
    return table, record["rows"], record["unreadable"]
