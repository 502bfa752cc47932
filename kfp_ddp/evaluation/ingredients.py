"""What the report needs of an evaluation beyond its record: pictures, settings, the dataset."""

import base64
import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.run_folder import RunFolder
from kfp_ddp.models.evaluation import Evaluation
from kfp_ddp.report.data import Dataset, Mistake, ReportData
from kfp_ddp.report.events import downsample, read_events
from kfp_ddp.storage import manifest
from kfp_ddp.training.config import MAX_PIXELS
from kfp_ddp.training.layout import Layout, lay_out
from kfp_ddp.training.shards import Where
from kfp_ddp.training.sides import SIDES, TRAIN

if TYPE_CHECKING:
    from kfp_ddp.evaluation.predict import Predictions
    from kfp_ddp.training.checkpoint import ModelInfo
    from kfp_ddp.training.splits import Index

THUMBNAIL_SIDE = 112
_SUREST = 3
"""For so many mistakes of the highest loss one more is shown for the confidence in it."""


def ingredients(
    found: "Predictions",
    info: "ModelInfo",
    *,
    run_dir: Path,
    dataset: Path,
    split: str,
    worst: int,
    test: Evaluation | None,
) -> ReportData:
    """All of them.

    Args:
        found: What every sample came to.
        info: Of the model.
        run_dir: Of the training, if that is where it trained.
        dataset: Folder of the version.
        split: That was evaluated.
        worst: How many mistakes to show.
        test: Of the same checkpoint on the test split.
    """
    most = info.config.get("max_pixels", MAX_PIXELS)
    pixels = most if isinstance(most, int) else MAX_PIXELS
    of_loss = found.worst(worst)
    wrong = (found.predicted != found.predicted.new_tensor(found.index.targets)).nonzero()[:, 0]
    order = wrong[found.confidence[wrong].argsort(descending=True, stable=True)]
    others = [int(at) for at in order[: 2 * worst] if int(at) not in of_loss][: worst // _SUREST]
    return ReportData(
        config=dict(info.config),
        events=downsample(read_events(RunFolder(run_dir).metrics)),
        dataset=dataset_facts(dataset, found.index, info.config, split),
        mistakes=[_mistake(found, at, pixels) for at in of_loss],
        surest=[_mistake(found, at, pixels) for at in others],
        test=test,
    )


def _mistake(found: "Predictions", at: int, max_pixels: int) -> Mistake:
    names, index = found.index.classes, found.index
    picture, tiny = _thumbnail(index.where(at), max_pixels)
    return Mistake(
        path=found.relative(at),
        target=names[index.targets[at]],
        predicted=names[int(found.predicted[at])],
        confidence=float(found.confidence[at]),
        loss=float(found.loss[at]),
        picture=picture,
        tiny=tiny,
    )


def _thumbnail(where: Where, max_pixels: int) -> tuple[str, bool]:
    """The picture as WebP in base64, at most 112 pixels a side, and whether it is tiny."""
    from PIL import Image

    from kfp_ddp.training.images import read

    # Decoded as the model saw it, and so without a second decoder that might refuse it.
    picture = Image.fromarray(read(where, max_pixels=max_pixels).permute(1, 2, 0).numpy())
    tiny = max(picture.size) < THUMBNAIL_SIDE // 2
    picture.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    buffer = io.BytesIO()
    picture.save(buffer, "WEBP", lossless=tiny, quality=80)
    return base64.b64encode(buffer.getvalue()).decode(), tiny


def dataset_facts(
    version: Path, index: "Index", config: Mapping[str, object], split: str
) -> Dataset:
    """What the version's manifest tells of it, and what of it is wrong.

    Args:
        version: Its folder.
        index: The images that were evaluated.
        config: Of the training.
        split: That was evaluated.
    """
    head = manifest.header(version / manifest.NAME)
    laid = _laid_out(version, config, index.classes) if head and split in SIDES else None
    names = (Path(path).relative_to(version).as_posix() for path in index.paths)
    evaluated = dict(zip(names, index.targets, strict=True))
    counts = laid.train.counts(len(index.classes)) if laid else []
    return Dataset(
        name=str(head.get("dataset", "")),
        source=str(head.get("source", "")),
        digest=str(head.get("digest", "")),
        files=_count(head, "files"),
        bytes=_count(head, "bytes"),
        sides={side: len(part) for side, part in laid.parts.items()} if laid else {},
        training=dict(zip(index.classes, counts, strict=True)) if laid else {},
        problems=_problems(version, evaluated, laid if split != TRAIN else None),
    )


def _laid_out(
    version: Path, config: Mapping[str, object], classes: tuple[str, ...]
) -> Layout | None:
    """The sides by the names in the manifest; None where a table says more than these."""
    share = config.get("val_fraction")
    share = share if isinstance(share, int | float) else 0
    if config.get("labels"):
        return None
    names = (row.name for row in manifest.rows(version / manifest.NAME))
    try:
        return lay_out(names, val_fraction=share, classes=classes)
    except InputError:
        return None


def _problems(version: Path, evaluated: Mapping[str, int], laid: Layout | None) -> list[str]:
    """Images of one content: on two sides, or of two classes in the split that is evaluated."""
    trained = set(laid.train.names) if laid else set()
    first: dict[tuple[int, int], str] = {}
    doubled: list[tuple[str, str]] = []
    for row in manifest.rows(version / manifest.NAME):
        if row.name in evaluated:
            here = first.setdefault((row.size, row.crc), row.name)
            if here != row.name:
                doubled.append((here, row.name))
    leaked = [
        (first[row.size, row.crc], row.name)
        for row in manifest.rows(version / manifest.NAME)
        if row.name in trained and (row.size, row.crc) in first
    ]
    said = []
    if leaked:
        part = len({name for name, _ in leaked}) / len(evaluated)
        said.append(
            f"{len(leaked):,} training images have the content of images of this split, "
            f"{part:.1%} of it: the first is {leaked[0][1]} = {leaked[0][0]}"
        )
    unlike = [pair for pair in doubled if evaluated[pair[0]] != evaluated[pair[1]]]
    if doubled:
        shown = (unlike or doubled)[0]
        more = ", of two classes, one of which is wrong" if unlike else ""
        said.append(
            f"{len(unlike or doubled):,} images of this split have the content of another{more}: "
            f"the first is {shown[1]} = {shown[0]}"
        )
    return said


def _count(head: Mapping[str, object], name: str) -> int:
    value = head.get(name)
    return value if isinstance(value, int) else 0
