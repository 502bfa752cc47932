"""Evaluation of further forms of a model on the complete split."""

import csv
import io
import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
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
    """A form as a function; one for images of any size gets them one by one, as decoded."""

    predict: Predict
    takes_any_size: bool = False


@dataclass
class _Batch:
    positions: list[int]
    squares: Tensor
    decoded: list[Tensor]


@dataclass(frozen=True)
class FormResult:
    """The evaluation of a form, and the predicted class of each sample by path."""

    evaluation: Evaluation
    predicted: dict[str, str]


def measure(
    forms: Mapping[str, Form], split: Path, info: ModelInfo, result: Evaluation
) -> tuple[dict[str, FormResult], dict[str, str]]:
    """Run all forms over the split in one pass, in which an image is decoded once.

    Args:
        forms: By name.
        split: `<dataset>/<name>`.
        info: Of the model.
        result: Its evaluation on this split.

    Returns:
        The results by form, and the errors of the other forms.

    Raises:
        InputError: an image cannot be read, or the samples are not those of the evaluation.
    """
    index, _ = sides_of(split.parent, split.name, info.classes, info.config)
    seen = {name: Tally(len(info.classes)) for name in forms}
    failed: dict[str, str] = {}
    readable: list[int] = []
    for batch in _decoded(index, info, any(form.takes_any_size for form in forms.values())):
        readable += batch.positions
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
            seen[name].update(logits, targets)
    read_ones, skipped = index.only(readable), len(index) - len(readable)
    results_by_form = {
        name: _result(seen[name], read_ones, skipped, split, info, result)
        for name in forms
        if name not in failed
    }
    return results_by_form, failed


def predictions_of(evaluation: Path, result: Evaluation) -> dict[str, tuple[str, str]]:
    """Return the true class and the prediction of the checkpoint for each sample, by path."""
    content = read_below(evaluation.parent, result.predictions, LARGEST_PREDICTIONS)
    rows = csv.DictReader(io.StringIO(content.decode(), newline=""))
    return {row["path"]: (row["target"], row["predicted"]) for row in rows}


def _logits(form: Form, batch: _Batch) -> Tensor:
    if not form.takes_any_size:
        return form.predict(batch.squares)
    return torch.cat([form.predict(image[None].contiguous()) for image in batch.decoded])


def _decoded(index: Index, info: ModelInfo, keep: bool) -> Iterator[_Batch]:
    """Yield all readable images in order; the next batch is decoded in the background."""

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
        images = [image for future in coming if (image := future.result()) is not None]
        squares = channels_last(len(images), info.image_size).contiguous()
        for row, (_, square, _) in enumerate(images):
            squares[row] = square
        decoded_images = [image for _, _, image in images if image is not None]
        return _Batch([at for at, _, _ in images], squares, decoded_images)

    with ThreadPoolExecutor(min(os.cpu_count() or 1, BATCH)) as pool:
        before: list[Future[tuple[int, Tensor, Tensor | None] | None]] = []
        for start in [*range(0, len(index), BATCH), len(index)]:
            coming = [
                pool.submit(decoded, at) for at in range(start, min(start + BATCH, len(index)))
            ]
            if before and (ready := batch(before)).positions:
                yield ready
            before = coming


def _result(
    tally: Tally, index: Index, skipped: int, split: Path, info: ModelInfo, result: Evaluation
) -> FormResult:
    predictions = Predictions(index, ("",) * skipped, tally)
    evaluation = results.summarise(
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
    if evaluation.samples_digest != result.samples_digest:
        raise InputError(
            f"{split} has other samples now than when it was evaluated: evaluate the model again"
        )
    # The same inputs must give the same bytes.
    same = {"seconds": 0.0, "written": result.written, "confusion": None, "hardware": ""}
    names = [info.classes[at] for at in predictions.predicted.tolist()]
    paths = [predictions.relative(at) for at in range(len(index))]
    return FormResult(evaluation.model_copy(update=same), dict(zip(paths, names, strict=True)))
