"""From predictions to the files of an evaluation."""

import shutil
import tempfile
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from kfp_ddp import report as reports
from kfp_ddp.core.errors import StorageError
from kfp_ddp.core.files import atomic_write, folder_below
from kfp_ddp.core.run_folder import VERDICT
from kfp_ddp.evaluation.samples import dataset_digest, samples_digest, split_digest
from kfp_ddp.models.evaluation import AGAIN, FILE, Baseline, Evaluation, reason, wilson

if TYPE_CHECKING:
    from kfp_ddp.evaluation.predict import Predictions
    from kfp_ddp.evaluation.slices import Tags
    from kfp_ddp.training.checkpoint import ModelInfo

CONFUSION_CLASSES = 200  # 126 KB of JSON


def summarise(
    found: "Predictions",
    info: "ModelInfo",
    *,
    dataset: Path,
    split: str,
    checkpoint: str,
    checkpoint_digest: str,
    device: str,
    started: float,
    skipped: int,
    tags: "Tags | None" = None,
    resamples: int = 0,
) -> Evaluation:
    """The record of an evaluation that began at `started` of the monotonic clock.

    `found` is of all samples of a split of the dataset but those `skipped`; `tags` are those of its
    slices, and of `resamples` bootstrap intervals are made.
    """
    from kfp_ddp.evaluation.intervals import balanced_accuracy, bootstrap

    tally, names = found.tally, list(info.classes)
    root, paths = found.index.root, [found.relative(i) for i in range(len(found.index))]
    areas = tally.areas()
    classes = tally.per_class(names, areas.per_class)
    precision, recall, f1 = tally.macro(classes)
    low, high = wilson(tally.correct, tally.samples)
    balanced, interval = balanced_accuracy(classes)
    largest = max(classes, key=lambda one: one.samples)
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
        checkpoint=checkpoint,
        checkpoint_digest=checkpoint_digest,
        dataset_digest=dataset_digest(dataset),
        samples_digest=samples_digest(
            (path, names[target]) for path, target in zip(paths, found.index.targets, strict=True)
        ),
        split_digest=split_digest(dataset, paths, root.relative_to(dataset).as_posix()),
        device=device,
        skipped=skipped,
        balanced_accuracy=balanced,
        macro_roc_auc=areas.macro,
        intervals={"balanced_accuracy": interval, **bootstrap(tally, resamples)},
        baseline=Baseline(name=largest.name, share=largest.samples / tally.samples),
        slices=tags.slices(found.index, found.predicted.tolist()) if tags else [],
        written=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=time.monotonic() - started,
    )


def prepare(target: Path, root: Path) -> None:
    """Make the folder and remove earlier records, so that a failed step leaves none.

    Args:
        target: The folder.
        root: One above it, below which no link is followed.

    Raises:
        StorageError: it cannot be written.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        with folder_below(root, target.relative_to(root), make=True):
            pass
        for name in (FILE, VERDICT):
            (target / name).unlink(missing_ok=True)
        if (target / AGAIN).is_symlink():
            (target / AGAIN).unlink()
        elif (target / AGAIN).exists():
            shutil.rmtree(target / AGAIN)
        with tempfile.NamedTemporaryFile(dir=target, prefix=".probe-"):
            pass
    except OSError as error:
        raise _unwritable(target, error) from None


def write(target: Path, root: Path, result: Evaluation, others: Mapping[str, str]) -> None:
    """Write the files of an evaluation, `evaluation.json` last, each complete or not there.

    Args:
        target: The folder, made if need be.
        root: One above it, below which no link is followed.
        result: The record.
        others: The texts of the other files by name.

    Raises:
        StorageError: it cannot be written.
    """
    files = {**others, FILE: result.model_dump_json(indent=1) + "\n"}
    try:
        with folder_below(root, target.relative_to(root), make=True):
            pass
        for name, text in files.items():
            with atomic_write(target / name, root=root) as file:
                file.write(text.encode())
    except OSError as error:
        raise _unwritable(target, error) from None


def report(target: Path, root: Path) -> str:
    """Write the report of an evaluation beside it.

    Raises:
        StorageError: it cannot be written.
    """
    try:
        return reports.write(target, root=root)
    except OSError as error:
        raise _unwritable(target, error) from None


def _unwritable(target: Path, error: OSError) -> StorageError:
    return StorageError(
        f"the evaluation cannot be written to {target}: {reason(error)}; "
        "make run_dir writable and give it room"
    )
