"""Record and files of an evaluation. Does not import torch."""

import hashlib
import math
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kfp_ddp.core.errors import writing
from kfp_ddp.core.files import atomic_write, folder_below, read_below
from kfp_ddp.core.run_folder import VERDICT
from kfp_ddp.evaluation.measure import CALIBRATION_BINS, Tally, bin_of
from kfp_ddp.models.evaluation import (
    CHAMPION_FOLDER,
    FILE,
    Z_95,
    ClassResult,
    Evaluation,
    Interval,
    wilson,
)
from kfp_ddp.storage import manifest

if TYPE_CHECKING:
    from kfp_ddp.evaluation.predict import Predictions
    from kfp_ddp.evaluation.slices import Tags
    from kfp_ddp.training.state.checkpoint import ModelInfo

ADVICE = "make run_dir writable and free space"
CONFUSION_CLASSES = 200  # 126 KB of JSON
_MAX_SUCCESS = 4096
"""Bytes of the file with the dataset's digest."""


def summarise(
    predictions: "Predictions",
    info: "ModelInfo",
    *,
    dataset: Path,
    split: str,
    tags: "Tags | None" = None,
    resamples: int = 0,
    **fields: Any,
) -> Evaluation:
    """Return the record of an evaluation, with these values of fields that are no figures.

    `predictions` are of all samples that were not skipped. Without `tags` there are no slices, with
    0 `resamples` no bootstrap intervals. `seconds` is 0.
    """
    from kfp_ddp.evaluation.results import balanced_accuracy, bootstrap

    tally, names, index = predictions.tally, list(info.classes), predictions.index
    root, paths = index.root, [predictions.relative(i) for i in range(len(index))]
    areas = tally.areas()
    classes = tally.per_class(names, areas.per_class)
    precision, recall, f1 = tally.macro(classes)
    low, high = wilson(tally.correct, tally.samples)
    balanced, interval = balanced_accuracy(classes)
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
        roc_auc=areas.roc.area if areas.roc else None,
        classes=classes,
        calibration=tally.calibration(),
        confusion=tally.confusion.tolist() if len(names) <= CONFUSION_CLASSES else None,
        model=info.model,
        image_size=info.image_size,
        step=info.step,
        dataset_digest=dataset_digest(dataset),
        samples_digest=samples_digest(
            (path, names[target]) for path, target in zip(paths, index.targets, strict=True)
        ),
        split_digest=split_digest(dataset, paths, root.relative_to(dataset).as_posix()),
        skipped=len(predictions.skipped),
        balanced_accuracy=balanced,
        macro_roc_auc=areas.macro,
        intervals={"balanced_accuracy": interval, **bootstrap(tally, resamples)},
        slices=tags.slices(index, tally.column("predicted").tolist()) if tags else [],
        tags=tags.where if tags else "",
        seconds=0.0,
        **fields,
    )


def dataset_digest(dataset: Path) -> str:
    """Return the digest that data_sync wrote for a complete version; '' without one."""
    try:
        text = read_below(dataset, manifest.SUCCESS, _MAX_SUCCESS)
    except (OSError, ValueError):
        return ""
    match = re.search(r"\b[0-9a-f]{64}\b", text.decode(errors="replace"))
    return match[0] if match else ""


def samples_digest(samples: Iterable[tuple[str, str]]) -> str:
    """Return the SHA-256 of sorted (path, class) pairs, without the content of the samples."""
    total = hashlib.sha256()
    for path, name in sorted(samples):
        total.update(f"{path}\0{name}\n".encode())
    return total.hexdigest()


def split_digest(dataset: Path, paths: Iterable[str], folder: str = "") -> str:
    """Return the SHA-256 of path, size and crc32c of samples, from the version's manifest.

    The paths are below `folder`, which is below `dataset`. '' without a manifest, or if it lacks a
    sample.
    """
    ordered = sorted(paths)
    names = {str(PurePosixPath(folder, path)): path for path in ordered}
    rows = manifest.rows(dataset / manifest.NAME)
    content = {names[row.name]: (row.size, row.crc) for row in rows if row.name in names}
    total = hashlib.sha256()
    for path in ordered:
        if path not in content:
            return ""
        size, crc = content[path]
        total.update(f"{path}\0{size}\0{crc:08x}\n".encode())
    return total.hexdigest()


def prepare(target: Path, root: Path) -> None:
    """Create the folder, without links below `root`, and remove earlier records."""
    with writing(target, ADVICE):
        root.mkdir(parents=True, exist_ok=True)
        with folder_below(root, target.relative_to(root), make=True):
            pass
        for name in (FILE, VERDICT):
            (target / name).unlink(missing_ok=True)
        if (target / CHAMPION_FOLDER).is_symlink():
            (target / CHAMPION_FOLDER).unlink()
        elif (target / CHAMPION_FOLDER).exists():
            shutil.rmtree(target / CHAMPION_FOLDER)
        tempfile.TemporaryFile(dir=target).close()


def write(target: Path, root: Path, result: Evaluation, others: Mapping[str, str]) -> None:
    """Write record and files (text by name) atomically, the record last; no link is followed."""
    files = {**others, FILE: result.model_dump_json(indent=1) + "\n"}
    with writing(target, ADVICE):
        with folder_below(root, target.relative_to(root), make=True):
            pass
        for name, text in files.items():
            with atomic_write(target / name, root=root) as file:
                file.write(text.encode())


Array = NDArray[Any]


def balanced_accuracy(classes: Sequence[ClassResult]) -> tuple[float, Interval]:
    """Return the mean recall of the classes with samples, and its interval.

    The Wilson distances of the classes, added as squares (MOVER; Zou and Donner 2008, Statistics
    in Medicine 27:1693), which is valid for small classes and at 0 and 1.
    """
    recalls = [(one.recall, one.recall_low, one.recall_high) for one in classes]
    known = [(own, low, high) for own, low, high in recalls if low is not None and high is not None]
    mean = math.fsum(own for own, _, _ in known) / len(known)
    below = math.hypot(*(own - low for own, low, _ in known)) / len(known)
    above = math.hypot(*(high - own for own, _, high in known)) / len(known)
    return mean, Interval(low=max(0.0, mean - below), high=min(1.0, mean + above))


def bootstrap(tally: Tally, resamples: int) -> dict[str, Interval]:
    """Return 95 % intervals of `macro_f1` and `calibration_error`, for any order of the samples.

    Empty if all samples are correct or all are incorrect, as resamples then do not vary, and for 0
    resamples.
    """
    if not resamples or tally.correct in (0, tally.samples):
        return {}
    names = ("targets", "predicted", "confidence")
    targets, predicted, confidence = (tally.column(name) for name in names)
    order = np.lexsort((confidence, predicted, targets))
    targets, predicted, confidence = targets[order], predicted[order], confidence[order]
    bins, sizes = bin_of(confidence), {"minlength": tally.classes}
    confidence = confidence.astype(np.float64)
    gaps = confidence - (targets == predicted)

    def macro_f1(at: Array) -> float:
        true, guess = targets[at], predicted[at]
        weight = np.bincount(true, **sizes) + np.bincount(guess, **sizes)
        right = np.bincount(true[true == guess], **sizes)
        seen = weight > 0
        return float((2 * right[seen] / weight[seen]).mean())

    def error(bins: Array, gaps: Array) -> float:
        return float(np.abs(np.bincount(bins, gaps, CALIBRATION_BINS)).sum() / len(gaps))

    n, draw = tally.samples, np.random.default_rng(0)
    drawn = np.empty((resamples, 3))
    for row in drawn:
        at = draw.integers(0, n, n)
        # The last is of a perfectly calibrated model with the same confidences.
        luck = error(bins, confidence - (draw.random(n) < confidence))
        row[:] = macro_f1(at), error(bins[at], gaps[at]), luck
    f1, errors, lucky = drawn.T
    return {
        "macro_f1": _bias_corrected(macro_f1(np.arange(n)), f1),
        "calibration_error": _off_zero(error(bins, gaps), errors, lucky),
    }


def _bias_corrected(value: float, drawn: Array) -> Interval:
    """Return bias-corrected percentiles (Efron 1981, Canadian J. Statistics 9:139)."""
    normal, n = NormalDist(), len(drawn)
    below = float((drawn < value).sum() + (drawn == value).sum() / 2) / n
    bias = 2 * normal.inv_cdf(min(max(below, 0.5 / n), 1 - 0.5 / n))
    low, high = np.quantile(drawn, [normal.cdf(bias - Z_95), normal.cdf(bias + Z_95)]).tolist()
    return Interval(low=min(low, value), high=max(high, value))


def _off_zero(value: float, drawn: Array, luck: Array) -> Interval:
    """Return the wider of two intervals, percentiles and percentiles mirrored at the value.

    Resampling overestimates the error. The low end is 0 if a perfectly calibrated model has such an
    error in 5 % of cases (Broecker and Smith 2007, Weather and Forecasting 22:651).
    """
    low, high = np.quantile(drawn, [0.025, 0.975]).tolist()
    least = 0.0 if (luck >= value).mean() >= 0.05 else min(low, max(0.0, 2 * value - high))
    return Interval(low=min(least, value), high=min(1.0, max(high, 2 * value - low, value)))
