"""What further forms of a model come to on every sample of the split that it was evaluated on."""

import csv
import io
import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.files import read_below
from kfp_ddp.evaluation import results
from kfp_ddp.evaluation.measure import Tally
from kfp_ddp.evaluation.predict import Predictions
from kfp_ddp.export.formats import Predict, reason
from kfp_ddp.models.evaluation import LARGEST_PREDICTIONS, Evaluation
from kfp_ddp.training import transforms
from kfp_ddp.training.checkpoint import ModelInfo
from kfp_ddp.training.data import channels_last
from kfp_ddp.training.images import read
from kfp_ddp.training.splits import Index, sides_of

BATCH = 32


@dataclass(frozen=True)
class Form:
    """A form as a function; one that takes whole images gets them one by one, as decoded."""

    predict: Predict
    takes_whole: bool = False


@dataclass
class _Batch:
    positions: list[int]
    squares: Tensor
    whole: list[Tensor]


@dataclass
class _Seen:
    """What a form has come to so far."""

    tally: Tally
    predicted: list[Tensor] = field(default_factory=list)
    confidence: list[Tensor] = field(default_factory=list)
    loss: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Told:
    """What a form came to: the record, and the class that it tells of each sample, by its path."""

    evaluation: Evaluation
    predicted: dict[str, str]


def measure(
    forms: Mapping[str, Form], split: Path, info: ModelInfo, result: Evaluation
) -> tuple[dict[str, Told], dict[str, str]]:
    """Run all forms over the split in one pass, in which an image is decoded once.

    Args:
        forms: By name.
        split: `<dataset>/<name>`.
        info: Of the model.
        result: Its evaluation on this split.

    Returns:
        What each came to, and why of others it is not known.

    Raises:
        InputError: an image cannot be read, or the samples are not those of the evaluation.
    """
    index, _ = sides_of(split.parent, split.name, info.classes, info.config)
    seen = {name: _Seen(Tally(len(info.classes))) for name in forms}
    failed: dict[str, str] = {}
    kept: list[int] = []
    for batch in _decoded(index, info, any(form.takes_whole for form in forms.values())):
        kept += batch.positions
        targets = torch.tensor([index.targets[at] for at in batch.positions])
        for name in [name for name in forms if name not in failed]:
            try:
                logits = _logits(forms[name], batch)
            except Exception as error:  # noqa: BLE001  a runtime fails in many ways
                failed[name] = reason(error)
                continue
            odd = (~logits.isfinite().all(1)).nonzero()
            if len(odd):
                path = index.paths[batch.positions[int(odd[0])]]
                failed[name] = f"it gives NaN or infinity for {Path(path).name}"
                continue
            found = seen[name].tally.update(logits, targets)
            for column in ("predicted", "confidence", "loss"):
                getattr(seen[name], column).append(getattr(found, column))
    read_ones, skipped = index.only(kept), len(index) - len(kept)
    told: dict[str, Told] = {}
    for name in [name for name in forms if name not in failed]:
        told[name] = _told(seen[name], read_ones, skipped, split, info, result)
    return told, failed


def said_before(evaluation: Path, result: Evaluation) -> dict[str, tuple[str, str]]:
    """The true class of each sample, and the one that the checkpoint tells, by its path."""
    content = read_below(evaluation.parent, result.predictions, LARGEST_PREDICTIONS)
    rows = csv.DictReader(io.StringIO(content.decode(), newline=""))
    return {row["path"]: (row["target"], row["predicted"]) for row in rows}


def _logits(form: Form, batch: _Batch) -> Tensor:
    if not form.takes_whole:
        return form.predict(batch.squares)
    return torch.cat([form.predict(image[None].contiguous()) for image in batch.whole])


def _decoded(index: Index, info: ModelInfo, keep: bool) -> Iterator[_Batch]:
    """Every image that can be read, in order; the next batch is decoded meanwhile."""

    def decoded(position: int) -> tuple[int, Tensor, Tensor | None] | None:
        try:
            image = read(index.where(position), max_pixels=info.max_pixels)
        except InputError:
            if info.on_bad_image == "fail":
                raise
            return None
        square = transforms.evaluate(image, info.image_size)
        return position, square, image if keep else None

    def batch(coming: list[Future[tuple[int, Tensor, Tensor | None] | None]]) -> _Batch:
        found = [one for each in coming if (one := each.result()) is not None]
        squares = channels_last(len(found), info.image_size).contiguous()
        for row, (_, square, _) in enumerate(found):
            squares[row] = square
        whole = [image for _, _, image in found if image is not None]
        return _Batch([at for at, _, _ in found], squares, whole)

    with ThreadPoolExecutor(min(os.cpu_count() or 1, BATCH)) as pool:
        before: list[Future[tuple[int, Tensor, Tensor | None] | None]] = []
        for start in [*range(0, len(index), BATCH), len(index)]:
            coming = [
                pool.submit(decoded, at) for at in range(start, min(start + BATCH, len(index)))
            ]
            if before and (found := batch(before)).positions:
                yield found
            before = coming


def _told(
    seen: _Seen, index: Index, skipped: int, split: Path, info: ModelInfo, result: Evaluation
) -> Told:
    predictions = Predictions(
        index=index,
        skipped=("",) * skipped,
        predicted=torch.cat(seen.predicted),
        confidence=torch.cat(seen.confidence),
        loss=torch.cat(seen.loss),
        tally=seen.tally,
    )
    found = results.summarise(
        predictions,
        info,
        dataset=split.parent,
        split=split.name,
        checkpoint=result.checkpoint,
        checkpoint_digest=result.checkpoint_digest,
        device="cpu",
        started=time.monotonic(),
        skipped=skipped,
    )
    if found.samples_digest != result.samples_digest:
        raise InputError(
            f"{split} has other samples now than when it was evaluated: evaluate the model again"
        )
    # A record of the same bundle is to be the same bytes.
    same = {"seconds": 0.0, "written": result.written, "confusion": None, "hardware": ""}
    names = [info.classes[at] for at in predictions.predicted.tolist()]
    paths = [predictions.relative(at) for at in range(len(index))]
    return Told(found.model_copy(update=same), dict(zip(paths, names, strict=True)))
