"""Further forms of a model: write them, evaluate them on the complete split, drop weak ones."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kfp_ddp.core.errors import InputError
from kfp_ddp.evaluation.comparison import newcombe
from kfp_ddp.export import formats, onnx_forms
from kfp_ddp.export.formats import ONNX, Predict
from kfp_ddp.export.whole_split import Form, FormResult, measure, predictions_of
from kfp_ddp.models import weights
from kfp_ddp.models.bundle import WEIGHTS
from kfp_ddp.models.evaluation import Evaluation
from kfp_ddp.models.release import Variants
from kfp_ddp.models.variants import FILES, Measured, Record
from kfp_ddp.training.checkpoint import ModelInfo

Details = dict[str, str | int]


@dataclass(frozen=True)
class Source:
    """The inputs of the forms."""

    folder: Path
    """The bundle, with the model's formats in it."""
    info: ModelInfo
    split: Path
    """`<dataset>/<name>` on which the model was evaluated."""
    evaluation: Path
    result: Evaluation


def _half(source: Source, settings: Variants, target: Path) -> Details:
    network, info = weights.read(source.folder / WEIGHTS, source.info.step)
    program = formats.trace(formats.HalfServable(network.half(), info).eval(), info.image_size)
    formats.write_onnx(program, source.info, target)
    return {"weights": "float16", "activations": "float16"}


def _int8(source: Source, settings: Variants, target: Path) -> Details:
    images = onnx_forms.calibration(source.split.parent, source.info, settings.calibration_images)
    count = onnx_forms.write_int8(_needed(source, ONNX), target, images)
    return {"weights": "int8 a channel", "activations": "uint8", "calibration_images": count}


def _whole(source: Source, settings: Variants, target: Path) -> Details:
    onnx_forms.write_whole(_needed(source, ONNX), target, source.info.image_size)
    return {"input": "uint8 [batch, 3, height, width], as decoded"}


@dataclass(frozen=True)
class _Kind:
    write: Callable[[Source, Variants, Path], Details]
    load: Callable[[Path], Predict]
    takes_any_size: bool = False


_KINDS: Mapping[str, _Kind] = {
    "fp16": _Kind(_half, formats.onnx_predict),
    "int8": _Kind(_int8, formats.onnx_predict),
    "resize": _Kind(_whole, formats.onnx_predict, takes_any_size=True),
}


def add(source: Source, settings: Variants) -> tuple[Record, dict[str, Predict]]:
    """Add the requested forms to a bundle.

    A form that cannot be written, does not run or loses more than allowed leaves no file.

    Args:
        source: Their inputs.
        settings: The requested forms, and the allowed loss.

    Returns:
        The record of all, and the remaining ones as functions by file.

    Raises:
        KfpDdpError: the split cannot be read, or the disk is full.
    """
    details: dict[str, Details] = {}
    forms: dict[str, Form] = {}
    left_out: dict[str, str] = {}
    for name in dict.fromkeys(settings.variants):
        kind = _KINDS[name]
        try:
            details[name] = kind.write(source, settings, source.folder / FILES[name])
            forms[name] = Form(kind.load(source.folder / FILES[name]), kind.takes_any_size)
        except (OSError, MemoryError):
            raise
        except Exception as error:  # noqa: BLE001  exporters and compilers fail in many ways
            left_out[name] = formats.reason(error)
    results, failed = (
        measure(forms, source.split, source.info, source.result) if forms else ({}, {})
    )
    before = predictions_of(source.evaluation, source.result) if results else {}
    measured = [_measured(name, results[name], before, source, details[name]) for name in results]
    left_out |= failed
    for one in measured:
        if -one.gain > settings.max_variant_drop:
            left_out[one.name] = (
                f"it loses {-one.gain:.4f} of the accuracy, {settings.max_variant_drop:g} is "
                "allowed (max_variant_drop)"
            )
    for dropped, why in left_out.items():
        (source.folder / FILES[dropped]).unlink(missing_ok=True)
        print(f"warning: {dropped} is left out: {why}", flush=True)
    remaining = [one for one in measured if one.name not in left_out]
    functions = {one.file: forms[one.name].predict for one in remaining}
    return Record(variants=remaining, left_out=left_out), functions


def _needed(source: Source, file: str) -> Path:
    path = source.folder / file
    if not path.exists():
        raise InputError(f"it is made from {file}, a format that the model cannot have")
    return path


def _measured(
    name: str,
    result: FormResult,
    before: Mapping[str, tuple[str, str]],
    source: Source,
    details: Details,
) -> Measured:
    """Return the record of a form; `before` has target and prediction of the checkpoint by path."""
    pairs = [(*before[path], now) for path, now in result.predicted.items()]
    won = sum(was != target == now for target, was, now in pairs)
    lost = sum(was == target != now for target, was, now in pairs)
    low, high = newcombe(result.evaluation.correct, source.result.correct, won, len(pairs))
    return Measured(
        name=name,
        file=FILES[name],
        size=(source.folder / FILES[name]).stat().st_size,
        evaluation=result.evaluation,
        agreement=sum(was == now for _, was, now in pairs) / len(pairs),
        gain=(won - lost) / len(pairs),
        low=low,
        high=high,
        won=won,
        lost=lost,
        made=details,
    )
