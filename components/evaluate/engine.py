"""The evaluate step: checkpoint and split in, `evaluation.json`, report and artifacts out."""

import math
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kfp_ddp.base import folders
from kfp_ddp.base.errors import InputError
from kfp_ddp.base.run_folder import RunFolder
from kfp_ddp.components.evaluate import results
from kfp_ddp.components.evaluate.settings import Measuring
from kfp_ddp.components.shared import champion as champions
from kfp_ddp.components.shared import report
from kfp_ddp.components.shared.each_node import at_hand
from kfp_ddp.components.shared.evaluation import AGAIN, FILE, PREDICTIONS, Evaluation
from kfp_ddp.components.shared.in_use import using
from kfp_ddp.components.shared.step import step
from kfp_ddp.components.shared.workspace import opened, own_folder
from kfp_ddp.training import mlflow_run
from kfp_ddp.training.sides import TEST

if TYPE_CHECKING:
    from kfp import dsl

    from kfp_ddp.components.evaluate.measure import Roc

CHARTED_CLASSES = 50  # the KFP UI draws a cell 700 / N pixels wide
LOGGED = (
    *("accuracy", "accuracy_low", "accuracy_high", "top5", "loss", "macro_f1"),
    *("calibration_error", "roc_auc", "samples", "skipped"),
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
    work_dir: str,
    evaluation_metrics: "dsl.Metrics",
    confusion_matrix: "dsl.ClassificationMetrics",
    evaluation_report: "dsl.HTML",
    evaluation_summary: "dsl.Markdown",
) -> tuple[float, str]:
    """Evaluate and fill the artifacts; the accuracy, and the path of `evaluation.json`."""
    Measuring.create(**options)
    elsewhere = not run_dir
    run_dir = run_dir or own_folder(folders.work_dir(work_dir), run_id, "evaluate")
    with (
        opened(run_dir, "evaluate") as folder,
        at_hand(dataset_path, folder.path) as data,
    ):
        with using("evaluate", run_dir, data):
            subject = checkpoint if elsewhere else folder.here(checkpoint)
            found = evaluate(subject, folder.path, data, split, batch_size, worst, champion)
        _track(folder.path, found.result)
        evaluation = folder.there(RunFolder(folder.path).evaluation(split) / FILE)
    from kfp_ddp.components.shared.report.summary import markdown

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


def _track(run_dir: Path, result: Evaluation) -> None:
    """Add the evaluation to the run of MLflow that the training has, if it has one."""
    names = ("accuracy", "accuracy_low", "accuracy_high", "loss", "macro_f1", "calibration_error")
    metrics = {f"evaluation/{name}": getattr(result, name) for name in names}
    digests = {f"kfp_ddp.{n}": getattr(result, n) for n in ("dataset_digest", "checkpoint_digest")}
    mlflow_run.note(run_dir, metrics, digests)


class Evaluated(NamedTuple):
    """The record of a split, its ROC and the HTML report, and the record of test beside val."""

    result: Evaluation
    roc: "Roc | None"
    document: str
    test: Evaluation | None


def evaluate(
    checkpoint: Path | str,
    run_dir: Path,
    dataset: Path,
    split: str,
    batch_size: int,
    worst: int,
    champion: str = "",
) -> Evaluated:
    """Evaluate on a split, and with val on test too; all is also written below `run_dir`.

    A champion whose own evaluation is of other samples is evaluated on these after it. A checkpoint
    as text may be a bundle, or an address.

    Raises:
        InputError: for a checkpoint, split, champion or parameter that cannot be used.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", split):
        raise InputError(f"split is {split!r}: it names a folder of the dataset, such as val")
    if batch_size < 1:
        raise InputError(f"batch_size is {batch_size}: images at a time must be at least 1")
    if not 0 <= worst <= 200:
        raise InputError(f"worst is {worst}: the report shows 0 to 200 mistakes")
    if isinstance(checkpoint, Path) and not checkpoint.is_dir():
        raise InputError(
            f"there is no checkpoint {checkpoint}: give the step folder that train returned"
        )
    held = champions.find(champion) if champion else None
    target = RunFolder(run_dir).evaluation(split)
    results.prepare(target, run_dir)
    started = time.monotonic()
    # From here on torch is needed, which takes seconds to import.
    import torch

    from kfp_ddp.components.evaluate import baseline, subject
    from kfp_ddp.components.evaluate.ingredients import ingredients
    from kfp_ddp.components.evaluate.predict import Predictions, predict
    from kfp_ddp.training.data import Index
    from kfp_ddp.training.splits import sides_of

    model, info, digest = subject.read(checkpoint)
    index, test_index = sides_of(dataset, split, info.classes, info.config)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def measure(index: Index, split: str, started: float) -> tuple[Predictions, Evaluation]:
        found = predict(model, info, index, batch_size, device, info.on_bad_image, info.max_pixels)
        if found.skipped:
            print(
                f"{len(found.skipped)} images that cannot be read are left out, as in training "
                f"under on_bad_image=skip; the first: {found.skipped[0]}"
            )
        return found, results.summarise(
            found,
            info,
            dataset=dataset,
            split=split,
            checkpoint=str(checkpoint),
            checkpoint_digest=digest,
            device=device.type,
            started=started,
            skipped=len(found.skipped),
        )

    found, result = measure(index, split, started)
    test = None
    if test_index is not None:
        folder = RunFolder(run_dir).evaluation(TEST)
        results.prepare(folder, run_dir)
        of_test, test = measure(test_index, TEST, time.monotonic())
        results.write(folder, run_dir, test, {PREDICTIONS: of_test.to_csv()})
    index = found.index
    left = ingredients(
        found, info, run_dir=run_dir, dataset=dataset, split=split, worst=worst, test=test
    )
    texts = {PREDICTIONS: found.to_csv(), report.INGREDIENTS: left.model_dump_json()}
    results.write(target, run_dir, result, texts)
    if held is not None:
        again = baseline.evaluate_again(
            held, result, dataset, index, batch_size, device, info.max_pixels, target / AGAIN
        )
        if again is not None:
            print(f"champion {held.uri} on this split: accuracy {again.accuracy:.4f}")
    document = results.report(target, run_dir)
    return Evaluated(result, found.tally.roc(), document, test)


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
