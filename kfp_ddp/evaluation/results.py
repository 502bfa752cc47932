"""Record and files of an evaluation."""

import hashlib
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from kfp_ddp.core.errors import writing
from kfp_ddp.core.files import atomic_write, folder_below, read_below
from kfp_ddp.core.run_folder import VERDICT
from kfp_ddp.models.evaluation import CHAMPION_FOLDER, FILE, Evaluation, wilson
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
    from kfp_ddp.evaluation.measure import balanced_accuracy, bootstrap

    tally = predictions.tally
    names = list(info.classes)
    index = predictions.index
    root = index.root
    paths = [predictions.relative(position) for position in range(len(index))]
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
    """Return the SHA-256 of path, size and token of samples, from the version's manifest.

    The paths are below `folder`, which is below `dataset`. '' without a manifest, or if it lacks a
    sample.
    """
    ordered = sorted(paths)
    names = {str(PurePosixPath(folder, path)): path for path in ordered}
    rows = manifest.rows(dataset / manifest.NAME)
    content = {names[row.name]: (row.size, row.token) for row in rows if row.name in names}
    total = hashlib.sha256()
    for path in ordered:
        if path not in content:
            return ""
        size, token = content[path]
        total.update(f"{path}\0{size}\0{token}\n".encode())
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
