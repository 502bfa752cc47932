"""Further forms of a model: write them, evaluate them on the complete split, drop weak ones."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.files import read_below
from kfp_ddp.core.log import log
from kfp_ddp.evaluation import results, slices
from kfp_ddp.evaluation.comparison import newcombe
from kfp_ddp.evaluation.measure import Tally
from kfp_ddp.evaluation.predict import Predictions, batches
from kfp_ddp.export import formats, onnx_forms
from kfp_ddp.export.formats import Predict, reason
from kfp_ddp.models import weights
from kfp_ddp.models.bundle import ONNX, WEIGHTS
from kfp_ddp.models.evaluation import LARGEST_PREDICTIONS, Evaluation, prediction_rows
from kfp_ddp.models.release import Variant, Variants
from kfp_ddp.models.variants import FILES, MeasuredVariant, VariantsRecord
from kfp_ddp.pictures.splits import sides_of
from kfp_ddp.training.data.loader import fixed_batches
from kfp_ddp.training.distributed import alone
from kfp_ddp.training.state.checkpoint import ModelInfo

BATCH = 32
Details = dict[str, str | int]


@dataclass(frozen=True)
class VariantSource:
    """The inputs of the forms."""

    folder: Path
    """The bundle, with the model's formats in it."""
    info: ModelInfo
    split: Path
    """`<dataset>/<name>` on which the model was evaluated."""
    evaluation: Path
    result: Evaluation


def _half(source: VariantSource, settings: Variants, target: Path) -> Details:
    network, info = weights.read(source.folder / WEIGHTS, source.info.step, allow_code=True)
    program = formats.trace(formats.HalfServable(network.half(), info).eval(), info.image_size)
    formats.write_onnx(program, source.info, target)
    return {"weights": "float16", "activations": "float16"}


def _int8(source: VariantSource, settings: Variants, target: Path) -> Details:
    images = onnx_forms.calibration(source.split.parent, source.info, settings.calibration_images)
    count = onnx_forms.write_int8(_needed(source, ONNX), target, images)
    return {"weights": "int8 a channel", "activations": "uint8", "calibration_images": count}


_WRITERS: Mapping[Variant, Callable[[VariantSource, Variants, Path], Details]] = {
    "fp16": _half,
    "int8": _int8,
}


def add(source: VariantSource, settings: Variants) -> tuple[VariantsRecord, dict[str, Predict]]:
    """Add the requested forms; one that does not run or loses too much leaves no file."""
    details: dict[str, Details] = {}
    forms: dict[str, Predict] = {}
    left_out: dict[str, str] = {}
    for name in dict.fromkeys(settings.variants):
        path = source.folder / FILES[name]
        try:
            details[name] = _WRITERS[name](source, settings, path)
            forms[name] = formats.onnx_predict(path)
        except (OSError, MemoryError):
            raise
        except Exception as error:  # noqa: BLE001  exporters raise many errors
            left_out[name] = reason(error)
    predictions, failed = measure(forms, source) if forms else ({}, {})
    left_out |= failed
    before = _checkpoint_predictions(source) if predictions else {}
    measured = [
        _measured(name, predicted, before, source, details[name])
        for name, predicted in predictions.items()
    ]
    for form in measured:
        if -form.gain > settings.max_variant_drop:
            left_out[form.name] = (
                f"it loses {-form.gain:.4f} of the accuracy, {settings.max_variant_drop:g} is "
                "allowed (max_variant_drop)"
            )
    for dropped, why in left_out.items():
        (source.folder / FILES[dropped]).unlink(missing_ok=True)
        log.warning(f"{dropped} is left out: {why}")
    remaining = [form for form in measured if form.name not in left_out]
    functions = {form.file: forms[form.name] for form in remaining}
    return VariantsRecord(variants=remaining, left_out=left_out), functions


def _checkpoint_predictions(source: VariantSource) -> dict[str, tuple[str, str]]:
    """Return the target and the checkpoint's prediction of each sample by path."""
    file = source.result.predictions
    rows = prediction_rows(read_below(source.evaluation.parent, file, LARGEST_PREDICTIONS))
    return {row["path"]: (row["target"], row["predicted"]) for row in rows}


def _needed(source: VariantSource, file: str) -> Path:
    path = source.folder / file
    if not path.exists():
        raise InputError(f"it is made from {file}, a format in which this model cannot be written")
    return path


def _measured(
    name: str,
    predictions: Predictions,
    before: Mapping[str, tuple[str, str]],
    source: VariantSource,
    details: Details,
) -> MeasuredVariant:
    """Return a form's record, with the checkpoint's target and prediction by path in `before`."""
    info = source.info
    split = source.split
    result = source.result
    tags = slices.read(result.tags, split.parent, predictions.index) if result.tags else None
    evaluation = results.summarise(
        predictions,
        info,
        dataset=split.parent,
        split=split.name,
        tags=tags,
        checkpoint=result.checkpoint,
        checkpoint_digest=result.checkpoint_digest,
        device="cpu",
        written=result.written,  # the same inputs must give the same bytes
    ).model_copy(update={"confusion": None})
    if evaluation.samples_digest != result.samples_digest:
        raise InputError(
            f"{split} has other samples now than when it was evaluated: evaluate the model again"
        )
    predicted = predictions.tally.column("predicted").tolist()
    pairs = [
        (*before[predictions.relative(at)], info.classes[now]) for at, now in enumerate(predicted)
    ]
    won = sum(was != target == now for target, was, now in pairs)
    lost = sum(was == target != now for target, was, now in pairs)
    low, high = newcombe(evaluation.correct, result.correct, won, len(pairs))
    return MeasuredVariant(
        name=name,
        file=FILES[name],
        size=(source.folder / FILES[name]).stat().st_size,
        evaluation=evaluation,
        agreement=sum(was == now for _, was, now in pairs) / len(pairs),
        gain=(won - lost) / len(pairs),
        low=low,
        high=high,
        won=won,
        lost=lost,
        made=details,
    )


def measure(
    forms: Mapping[str, Predict], source: VariantSource
) -> tuple[dict[str, Predictions], dict[str, str]]:
    """Run all forms over the split in one pass; return predictions, and errors of the others."""
    split = source.split
    info = source.info
    index, _ = sides_of(split.parent, split.name, info.classes, info.config)
    seen = {name: Tally(len(info.classes)) for name in forms}
    failed: dict[str, str] = {}
    readable: list[int] = []
    world = alone(torch.device("cpu"))
    work = ((index, keys) for keys in fixed_batches(index, BATCH, 0, 1))
    for (squares, targets, positions, *_), _ in batches(work, info.image_size, world, info.reading):
        readable += positions
        for name, predict in forms.items():
            if name in failed:
                continue
            try:
                logits = predict(squares.contiguous())
            except Exception as error:  # noqa: BLE001  runtimes raise many errors
                failed[name] = reason(error)
                continue
            odd = (~logits.isfinite().all(1)).nonzero()
            if len(odd):
                path = index.paths[positions[int(odd[0])]]
                failed[name] = f"it gives NaN or infinity for {Path(path).name}"
                continue
            seen[name].update(logits, torch.tensor(targets))
    samples = index.only(readable)
    skipped = ("",) * (len(index) - len(readable))
    predictions = {
        name: Predictions(samples, skipped, tally, torch.empty(0))
        for name, tally in seen.items()
        if name not in failed
    }
    return predictions, failed
