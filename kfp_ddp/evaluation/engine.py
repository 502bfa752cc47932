"""The evaluate step: checkpoint and split in, `evaluation.json`, report and artifacts out."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kfp_ddp.core import folders
from kfp_ddp.core.run_folder import RunFolder
from kfp_ddp.core.step import step
from kfp_ddp.datasets.access import at_hand, using
from kfp_ddp.evaluation.launched import here, on_cluster, specified
from kfp_ddp.evaluation.ranks import Evaluated, evaluate, evaluate_share
from kfp_ddp.evaluation.request import Request
from kfp_ddp.jobs.local import local_gpus
from kfp_ddp.models.evaluation import FILE, Evaluation
from kfp_ddp.runs.workspace import RunWorkspace, create_run_folder, open_workspace
from kfp_ddp.training import trackers

__all__ = ["Evaluated", "evaluate", "log_charts", "log_metrics", "run"]

if TYPE_CHECKING:
    from kfp import dsl

    from kfp_ddp.evaluation.roc import Roc

CHARTED_CLASSES = 50  # the KFP UI draws a cell 700 / N pixels wide
LOGGED = (
    *("accuracy", "accuracy_low", "accuracy_high", "top5", "loss", "macro_f1"),
    *("balanced_accuracy", "calibration_error", "roc_auc", "macro_roc_auc", "samples", "skipped"),
)


@step
def run(
    *,
    checkpoint: str,
    run_dir: str,
    dataset_path: str,
    split: str,
    batch_size: int,
    worst: int,
    champion: str,
    options: Mapping[str, Any],
    run_id: str,
    task_name: str,
    task_id: str,
    work_dir: str,
    backend: str,
    job: Mapping[str, Any],
    image: str,
    task_config: Any,
    evaluation_metrics: "dsl.Metrics",
    confusion_matrix: "dsl.ClassificationMetrics",
    evaluation_report: "dsl.HTML",
    evaluation_summary: "dsl.Markdown",
) -> tuple[float, str]:
    """Evaluate and fill the artifacts; the accuracy, and the path of `evaluation.json`."""
    fields = specified(job, image, backend)
    request = Request.create(
        checkpoint=checkpoint,
        of_run=bool(run_dir),
        run_dir=run_dir or create_run_folder(folders.work_dir(work_dir), run_id, "evaluate"),
        data=dataset_path,
        split=split,
        batch_size=batch_size,
        worst=worst,
        champion=champion,
        options=dict(options),
    )
    request.check()
    if backend != "local":
        with using("evaluate", request.run_dir, dataset_path):
            on_cluster(request, fields, task_config, backend, (run_id, task_name, task_id))
    with open_workspace(request.run_dir, "evaluate") as folder:
        target = RunFolder(folder.path).evaluation(split)
        if backend == "local":
            found = _evaluated_here(request, folder, int(fields.get("nproc_per_node", 0)))
        else:
            folder.download_below(f"{target.name}/")
            found = Evaluated.read(target)
        _track(folder.path, found.result)
        evaluation = folder.to_uri(target / FILE)
    from kfp_ddp.report.summary import markdown

    result = found.result
    log_metrics(result, evaluation_metrics)
    log_charts(result, found.roc, confusion_matrix)
    Path(evaluation_report.path).write_text(found.document, encoding="utf-8")
    Path(evaluation_summary.path).write_text(markdown(result, found.test), encoding="utf-8")
    print(f"accuracy {result.accuracy:.4f} on {result.samples} samples in {result.seconds:.1f} s")
    if found.test is not None:
        log_metrics(found.test, evaluation_metrics, "test_")
        print(f"accuracy {found.test.accuracy:.4f} on {found.test.samples} samples of test")
    return result.accuracy, evaluation


def _evaluated_here(request: Request, folder: RunWorkspace, ranks: int) -> Evaluated:
    """Evaluate in this process, or with so many of this step; 0 for one for each GPU."""
    checkpoint = (
        request.checkpoint if not request.of_run else str(folder.download(request.checkpoint))
    )
    with (
        at_hand(request.data, folder.path) as data,
        using("evaluate", request.run_dir, data),
    ):
        places = {"checkpoint": checkpoint, "run_dir": str(folder.path), "data": str(data)}
        request = Request.create(**{**request.given(), **places})
        ranks = ranks or local_gpus()
        if ranks > 1:
            here(request, ranks)
            return Evaluated.read(request.target)
        found = evaluate_share(request)
        assert found is not None  # the first of one
        return found


def _track(run_dir: Path, result: Evaluation) -> None:
    """Add the evaluation to the run of MLflow that the training has, if it has one."""
    names = ("accuracy", "accuracy_low", "accuracy_high", "loss", "macro_f1", "calibration_error")
    metrics = {f"evaluation/{name}": getattr(result, name) for name in names}
    digests = {f"kfp_ddp.{n}": getattr(result, n) for n in ("dataset_digest", "checkpoint_digest")}
    trackers.note(run_dir, metrics, digests)


def log_metrics(result: Evaluation, metrics: "dsl.Metrics", prefix: str = "") -> None:
    """Fill a Metrics artifact; only finite numbers, others make the step's output unreadable."""
    for name in LOGGED:
        value = getattr(result, name)
        if value is not None and math.isfinite(value):
            metrics.log_metric(prefix + name, round(float(value), 6))


def log_charts(result: Evaluation, roc: "Roc | None", chart: "dsl.ClassificationMetrics") -> None:
    """Fill a ClassificationMetrics artifact, where there are few enough classes to see them."""
    if result.confusion is None or len(result.classes) > CHARTED_CLASSES:
        return
    chart.log_confusion_matrix([c.name for c in result.classes], result.confusion)
    if roc is not None:
        chart.log_roc_curve(roc.false_positive_rate, roc.true_positive_rate, roc.threshold)
