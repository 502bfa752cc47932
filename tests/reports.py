"""The folder of an evaluation, by its confusion matrix."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kfp_ddp.models.evaluation import CalibrationBin, ClassResult
from kfp_ddp.report.data import Dataset, Mistake, ReportData
from tests.evaluations import record

PIXEL = "UklGRiQAAABXRUJQVlA4IBgAAAAwAQCdASoBAAEAAgA0JaQAA3AA/vuUAAA="


def make(folder: Path, names: Sequence[str], counts: Sequence[Sequence[int]], **more: Any) -> Path:
    """Write an evaluation and return its folder.

    Args:
        folder: Is created.
        names: Of the classes.
        counts: Samples of each true class by predicted class.
        more: Fields of the record, of `ReportData`, and `verdict`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data = {name: more.pop(name) for name in list(more) if name in ReportData.model_fields}
    verdict = more.pop("verdict", None)
    samples, correct = sum(map(sum, counts)), sum(row[i] for i, row in enumerate(counts))
    predicted = [sum(row[i] for row in counts) for i in range(len(names))]
    classes = [
        ClassResult(
            name=name,
            samples=sum(row),
            precision=row[i] / max(1, predicted[i]),
            recall=row[i] / max(1, sum(row)),
            f1=2 * row[i] / max(1, sum(row) + predicted[i]),
        )
        for i, (name, row) in enumerate(zip(names, counts, strict=True))
    ]
    calibration = [CalibrationBin(samples=samples, confidence=0.9, accuracy=0.9)]
    fields = {"classes": classes, "calibration": calibration, "confusion": counts, **more}
    evaluation = record(correct, samples, **fields)
    (folder / "evaluation.json").write_text(evaluation.model_dump_json())
    lines = ["path,target,predicted,confidence,loss"]
    lines += [
        f"{i}/{j}-{k}.png,{names[i]},{names[j]},0.9,0.1"
        for i, row in enumerate(counts)
        for j, count in enumerate(row)
        for k in range(count)
    ]
    (folder / "predictions.csv").write_text("\n".join(lines) + "\n")
    (folder / "report.json").write_text(ReportData(**data).model_dump_json())
    if verdict is not None:
        (folder / "verdict.json").write_text(json.dumps(verdict))
    return folder


def mistake(
    path: str, target: str = "cat", predicted: str = "dog", confidence: float = 0.97
) -> Mistake:
    """Return an incorrectly predicted sample."""
    known = {"target": target, "predicted": predicted, "confidence": confidence, "loss": 3.5}
    return Mistake(path=path, picture=PIXEL, **known)


def dataset(**more: Any) -> Dataset:
    """Return the manifest of a dataset."""
    known: dict[str, Any] = {"name": "flowers", "sides": {"train": 900, "val": 100}}
    return Dataset(**{**known, **more})
