"""The evaluate step: checkpoint and split in, `evaluation.json`, report and artifacts out."""

import json
import math
import os
import re
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kfp_ddp.components.evaluate.record import (
    FILE,
    PREDICTIONS,
    Evaluation,
    digest_of_samples,
    reason,
    wilson,
)
from kfp_ddp.components.step import step
from kfp_ddp.training.errors import InputError

if TYPE_CHECKING:
    from kfp import dsl

    from kfp_ddp.components.evaluate.measure import Roc
    from kfp_ddp.components.evaluate.predict import Predictions
    from kfp_ddp.training.checkpoint import ModelInfo

CHARTED_CLASSES = 50  # the KFP UI draws a cell 700 / N pixels wide
CONFUSION_CLASSES = 200  # 126 KB of JSON


@step
def run(
    *,
    checkpoint: str,
    run_dir: str,
    dataset_path: str,
    split: str,
    batch_size: int,
    worst: int,
    metrics: "dsl.Metrics",
    confusion: "dsl.ClassificationMetrics",
    report: "dsl.HTML",
    summary: "dsl.Markdown",
) -> tuple[float, str]:
    """Evaluate and fill the artifacts.

    Returns:
        Accuracy, and the path of `evaluation.json`.
    """
    result, roc, document = evaluate(
        Path(checkpoint), Path(run_dir), Path(dataset_path), split, batch_size, worst
    )
    from kfp_ddp.components.evaluate.report import markdown

    log_metrics(result, metrics)
    log_charts(result, roc, confusion)
    Path(report.path).write_text(document, encoding="utf-8")
    Path(summary.path).write_text(markdown(result), encoding="utf-8")
    print(f"accuracy {result.accuracy:.4f} on {result.samples} samples in {result.seconds:.1f} s")
    return result.accuracy, str(folder(Path(run_dir), split) / FILE)


def folder(run_dir: Path, split: str) -> Path:
    """Where the evaluation of a split lies; that of `val` is the run's own."""
    return run_dir / ("evaluation" if split == "val" else f"evaluation-{split}")


def evaluate(
    checkpoint: Path, run_dir: Path, dataset: Path, split: str, batch_size: int, worst: int
) -> "tuple[Evaluation, Roc | None, str]":
    """The record, the ROC and the HTML report; all is also written below `run_dir`.

    Raises:
        InputError: for a checkpoint, split or parameter that cannot be used.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", split):
        raise InputError(f"split is {split!r}: it names a folder of the dataset, such as val")
    if batch_size < 1:
        raise InputError(f"batch_size is {batch_size}: images at a time must be at least 1")
    if not 0 <= worst <= 200:
        raise InputError(f"worst is {worst}: the report shows 0 to 200 mistakes")
    if not checkpoint.is_dir():
        raise InputError(
            f"there is no checkpoint {checkpoint}: give the step folder that train returned"
        )
    if not (dataset / split).is_dir():
        raise InputError(
            f"the dataset {dataset} has no folder {split}/: evaluation needs "
            f"{split}/<class>/ with images"
        )
    target = folder(run_dir, split)
    _prepare(target)
    started = time.monotonic()
    # From here on torch is needed, which takes seconds to import.
    import torch

    from kfp_ddp.components.evaluate import report
    from kfp_ddp.components.evaluate.predict import predict
    from kfp_ddp.training import data
    from kfp_ddp.training.checkpoint import load_model

    model, info = load_model(checkpoint)
    index = data.scan(dataset / split, classes=info.classes)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = predict(model, info, index, batch_size, device)

    result = _record(found, info, checkpoint, dataset, split, device.type, started)
    names = list(info.classes)
    mistakes = [
        report.Mistake(
            file=Path(index.paths[at]),
            path=found.relative(at),
            target=names[index.targets[at]],
            predicted=names[int(found.predicted[at])],
            confidence=float(found.confidence[at]),
        )
        for at in found.worst(worst)
    ]
    document = report.html(result, run_dir, mistakes, info.config)
    _write(target, result, found.to_csv(), document)
    return result, found.tally.roc(), document


def log_metrics(result: Evaluation, metrics: "dsl.Metrics") -> None:
    """Fill a Metrics artifact; only finite numbers, others make the step's output unreadable."""
    values = {
        "accuracy": result.accuracy,
        "accuracy_low": result.accuracy_low,
        "accuracy_high": result.accuracy_high,
        "top5": result.top5,
        "loss": result.loss,
        "macro_f1": result.macro_f1,
        "calibration_error": result.calibration_error,
        "roc_auc": result.roc_auc,
        "samples": float(result.samples),
    }
    for name, value in values.items():
        if value is not None and math.isfinite(value):
            metrics.log_metric(name, round(value, 6))


def log_charts(result: Evaluation, roc: "Roc | None", chart: "dsl.ClassificationMetrics") -> None:
    """Fill a ClassificationMetrics artifact, where there are few enough classes to see them."""
    if result.confusion is None or len(result.classes) > CHARTED_CLASSES:
        return
    chart.log_confusion_matrix([c.name for c in result.classes], result.confusion)
    if roc is not None:
        chart.log_roc_curve(roc.false_positive_rate, roc.true_positive_rate, roc.threshold)


def dataset_digest(dataset: Path) -> str:
    """The digest that data_sync wrote when the version was complete; '' if there is none."""
    try:
        text = (dataset / "_SUCCESS").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
    found = re.search(r"\b[0-9a-f]{64}\b", text)
    return found[0] if found else ""


def checkpoint_digest(checkpoint: Path) -> str:
    """SHA-256 of the checkpoint's state, from its manifest."""
    manifest = json.loads((checkpoint / "manifest.json").read_text(encoding="utf-8"))
    return str(manifest["files"]["state.pt"]["sha256"])


def _record(
    found: "Predictions",
    info: "ModelInfo",
    checkpoint: Path,
    dataset: Path,
    split: str,
    device: str,
    started: float,
) -> Evaluation:
    tally, names = found.tally, list(info.classes)
    classes = tally.per_class(names)
    precision, recall, f1 = tally.macro(classes)
    low, high = wilson(tally.correct, tally.samples)
    roc = tally.roc()
    samples = ((found.relative(i), names[t]) for i, t in enumerate(found.index.targets))
    return Evaluation(
        split=split,
        samples=tally.samples,
        correct=tally.correct,
        accuracy=tally.correct / tally.samples,
        accuracy_low=low,
        accuracy_high=high,
        loss=tally.loss,
        top5=tally.top5,
        macro_precision=precision,
        macro_recall=recall,
        macro_f1=f1,
        calibration_error=tally.calibration_error,
        roc_auc=roc.area if roc else None,
        classes=classes,
        calibration=tally.calibration(),
        confusion=tally.confusion.tolist() if len(names) <= CONFUSION_CLASSES else None,
        model=info.model,
        image_size=info.image_size,
        step=info.step,
        checkpoint=str(checkpoint),
        checkpoint_digest=checkpoint_digest(checkpoint),
        dataset_digest=dataset_digest(dataset),
        samples_digest=digest_of_samples(samples),
        device=device,
        seconds=time.monotonic() - started,
    )


def _prepare(target: Path) -> None:
    """Make the folder and remove an earlier record, so that a failed step leaves none."""
    try:
        target.mkdir(parents=True, exist_ok=True)
        (target / FILE).unlink(missing_ok=True)
        with tempfile.NamedTemporaryFile(dir=target, prefix=".probe-"):
            pass
    except OSError as error:
        raise _unwritable(target, error) from None


def _write(target: Path, result: Evaluation, predictions: str, document: str) -> None:
    """Write the files of an evaluation, `evaluation.json` last, each complete or not there."""
    files = {
        PREDICTIONS: predictions,
        "report.html": document,
        FILE: result.model_dump_json(indent=1) + "\n",
    }
    try:
        for name, text in files.items():
            part = target / f".{name}.part"
            with part.open("w", encoding="utf-8", newline="") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            part.replace(target / name)
    except OSError as error:
        raise _unwritable(target, error) from None


def _unwritable(target: Path, error: OSError) -> InputError:
    return InputError(
        f"the evaluation cannot be written to {target}: {reason(error)}; "
        "make run_dir writable and give it room"
    )
