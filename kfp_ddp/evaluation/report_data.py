"""Data of the report beyond the evaluation: mistakes, settings, events and dataset."""

import base64
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.run_folder import RunFolder
from kfp_ddp.models.evaluation import Evaluation
from kfp_ddp.pictures.layout import Layout, lay_out, recorded_rule
from kfp_ddp.pictures.reading import Reading
from kfp_ddp.pictures.shards import Where
from kfp_ddp.pictures.sides import SIDES, TRAIN
from kfp_ddp.report.data import Dataset, Doubtful, Mistake, ReportData
from kfp_ddp.report.events import downsample
from kfp_ddp.storage import manifest
from kfp_ddp.training.spec.metrics import read_events

if TYPE_CHECKING:
    from kfp_ddp.evaluation.label_check import Doubt
    from kfp_ddp.evaluation.predict import Predictions
    from kfp_ddp.pictures.splits import Index
    from kfp_ddp.training.state.checkpoint import ModelInfo

NOTES_VARIABLE = "KFP_DDP_DATASET_NOTES"
"""Lines about files of the source that a local run does not copy."""
THUMBNAIL_SIDE = 112
_PER_CONFIDENT = 3
"""Mistakes with the highest loss for each one with the highest confidence."""


def report_data(
    predictions: "Predictions",
    info: "ModelInfo",
    *,
    run_dir: Path,
    dataset: Path,
    split: str,
    worst: int,
    test: Evaluation | None,
    doubts: Sequence["Doubt"],
    uncompared: str,
    least_score: float,
) -> ReportData:
    """Return the content of `report.json`, with the `worst` mistakes and doubtful labels.

    `dataset` is the folder of the version, `test` the evaluation of the same checkpoint on test.
    """
    by_loss = predictions.worst(worst, "loss")
    by_confidence = predictions.worst(2 * worst, "confidence")
    others = [position for position in by_confidence if position not in by_loss]
    confident = others[: worst // _PER_CONFIDENT]
    return ReportData(
        config=dict(info.config),
        events=downsample(read_events(RunFolder(run_dir).metrics)),
        dataset=dataset_facts(dataset, predictions.index, info.config, split),
        mistakes=[_mistake(predictions, position, info.reading) for position in by_loss],
        surest=[_mistake(predictions, position, info.reading) for position in confident],
        doubtful=[
            _doubtful(doubt, info.reading)
            for reason in ("label", "duplicate")
            for doubt in [doubt for doubt in doubts if doubt.reason == reason][: worst // 2]
        ],
        doubts=len(doubts),
        uncompared=uncompared,
        least_score=least_score,
        test=test,
    )


def _doubtful(doubt: "Doubt", reading: Reading) -> Doubtful:
    pictures = [_thumbnail(image, reading) for image in doubt.images]
    return Doubtful(**{**doubt._asdict(), "pictures": pictures})


def _mistake(predictions: "Predictions", position: int, reading: Reading) -> Mistake:
    index = predictions.index
    column = predictions.tally.column
    picture, tiny = _thumbnail(index.where(position), reading)
    return Mistake(
        path=predictions.relative(position),
        target=index.classes[index.targets[position]],
        predicted=index.classes[column("predicted")[position]],
        confidence=float(column("confidence")[position]),
        loss=float(column("loss")[position]),
        picture=picture,
        tiny=tiny,
    )


def _thumbnail(where: Where, reading: Reading) -> tuple[str, bool]:
    """Return the picture as WebP in base64, at most 112 pixels wide and high, and if it is tiny."""
    from PIL import Image

    from kfp_ddp.training.data.image_files import read

    # The decoder of the training, as another one may reject the image.
    picture = Image.fromarray(read(where, reading).permute(1, 2, 0).numpy())
    tiny = max(picture.size) < THUMBNAIL_SIDE // 2
    picture.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    buffer = io.BytesIO()
    picture.save(buffer, "WEBP", lossless=tiny, quality=80)
    return base64.b64encode(buffer.getvalue()).decode(), tiny


def dataset_facts(
    version: Path, index: "Index", config: Mapping[str, object], split: str
) -> Dataset:
    """Return the manifest of a dataset version, and its problems for an evaluated split."""
    head = manifest.header(version / manifest.NAME)
    layout = _layout(version, config, index.classes) if head and split in SIDES else None
    names = (Path(path).relative_to(version).as_posix() for path in index.paths)
    evaluated = dict(zip(names, index.targets, strict=True))
    counts = layout.train.counts(len(index.classes)) if layout else []
    sizes = (head.get("files"), head.get("bytes"))
    number, size = (value if isinstance(value, int) else 0 for value in sizes)
    notes = [*(layout.notes if layout else ()), *os.environ.get(NOTES_VARIABLE, "").splitlines()]
    return Dataset(
        name=str(head.get("dataset", "")),
        source=str(head.get("source", "")),
        digest=str(head.get("digest", "")),
        files=number,
        bytes=size,
        sides={side: len(part) for side, part in layout.parts.items()} if layout else {},
        training=dict(zip(index.classes, counts, strict=True)) if layout else {},
        problems=[
            *_problems(version, evaluated, layout if split != TRAIN else None),
            *dict.fromkeys(notes),
        ],
    )


def _layout(version: Path, config: Mapping[str, object], classes: tuple[str, ...]) -> Layout | None:
    """Return the sides by the names in the manifest; None if a table of labels defines them."""
    rule = recorded_rule(config)
    if rule.labels:
        return None
    names = (row.name for row in manifest.rows(version / manifest.NAME))
    try:
        return lay_out(names, rule, classes=classes)
    except InputError:
        return None


def _problems(version: Path, evaluated: Mapping[str, int], layout: Layout | None) -> list[str]:
    """Return images of equal content: on two sides, or twice in the evaluated split."""
    trained = set(layout.train.names) if layout else set()
    rows = version / manifest.NAME
    first: dict[tuple[int, int], str] = {}
    doubled: list[tuple[str, str]] = []
    for row in manifest.rows(rows):
        if row.name in evaluated:
            original = first.setdefault((row.size, row.crc), row.name)
            if original != row.name:
                doubled.append((original, row.name))
    leaked = []
    for row in manifest.rows(rows):
        original = first.get((row.size, row.crc), "")
        if original and row.name in trained:
            leaked.append((original, row.name))
    mislabelled = [pair for pair in doubled if evaluated[pair[0]] != evaluated[pair[1]]]
    lines = []
    if leaked:
        lines.append(_leaked_line(leaked, len(evaluated)))
    if mislabelled:
        lines.append(_doubled_line(mislabelled, " with another class, one of which is incorrect"))
    elif doubled:
        lines.append(_doubled_line(doubled, ""))
    return lines


def _leaked_line(leaked: Sequence[tuple[str, str]], evaluated: int) -> str:
    """Return the problem of pairs of an evaluated and a training image."""
    part = len({name for name, _ in leaked}) / evaluated
    original, copy = leaked[0]
    return (
        f"{len(leaked):,} training images are equal to images of this split, "
        f"{part:.1%} of it: the first is {copy} = {original}"
    )


def _doubled_line(pairs: Sequence[tuple[str, str]], note: str) -> str:
    """Return the problem of pairs of images of the split."""
    original, copy = pairs[0]
    return (
        f"{len(pairs):,} images of this split are equal to another one{note}: "
        f"the first is {copy} = {original}"
    )
