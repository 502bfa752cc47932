"""The further forms of a model: made, measured on the whole split, and kept or left out."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kfp_ddp.core.errors import InputError
from kfp_ddp.evaluation.comparison import newcombe
from kfp_ddp.export import formats, onnx_forms
from kfp_ddp.export.formats import ONNX, Predict
from kfp_ddp.export.whole_split import Form, Told, measure, said_before
from kfp_ddp.models import weights
from kfp_ddp.models.bundle import WEIGHTS
from kfp_ddp.models.evaluation import Evaluation
from kfp_ddp.models.release import Variants
from kfp_ddp.models.variants import FILES, Measured, Record
from kfp_ddp.training.checkpoint import ModelInfo

Made = dict[str, str | int]


@dataclass(frozen=True)
class Source:
    """What the forms are made from."""

    folder: Path
    """The bundle, with the model's own formats in it."""
    info: ModelInfo
    split: Path
    """`<dataset>/<name>`, which the model was evaluated on."""
    evaluation: Path
    result: Evaluation


def _half(source: Source, asked: Variants, target: Path) -> Made:
    network, info = weights.read(source.folder / WEIGHTS, source.info.step)
    program = formats.trace(formats.HalfServable(network.half(), info).eval(), info.image_size)
    formats.write_onnx(program, source.info, target)
    return {"weights": "float16", "activations": "float16"}


def _int8(source: Source, asked: Variants, target: Path) -> Made:
    images = onnx_forms.calibration(source.split.parent, source.info, asked.calibration_images)
    count = onnx_forms.write_int8(_needed(source, ONNX), target, images)
    return {"weights": "int8 a channel", "activations": "uint8", "calibration_images": count}


def _whole(source: Source, asked: Variants, target: Path) -> Made:
    onnx_forms.write_whole(_needed(source, ONNX), target, source.info.image_size)
    return {"input": "uint8 [batch, 3, height, width], as decoded"}


@dataclass(frozen=True)
class _Kind:
    write: Callable[[Source, Variants, Path], Made]
    load: Callable[[Path], Predict]
    takes_whole: bool = False


_KINDS: Mapping[str, _Kind] = {
    "fp16": _Kind(_half, formats.onnx_predict),
    "int8": _Kind(_int8, formats.onnx_predict),
    "resize": _Kind(_whole, formats.onnx_predict, takes_whole=True),
}


def add(source: Source, asked: Variants) -> tuple[Record, dict[str, Predict]]:
    """Add the forms that were asked for to a bundle.

    A form that cannot be made, does not run or loses more than allowed leaves no file.

    Args:
        source: What they are made from.
        asked: Which, and how much one may lose.

    Returns:
        The record of all, and those that stay as functions by their files.

    Raises:
        KfpDdpError: the split cannot be read, or there is no room.
    """
    made: dict[str, Made] = {}
    forms: dict[str, Form] = {}
    left_out: dict[str, str] = {}
    for name in dict.fromkeys(asked.variants):
        kind = _KINDS[name]
        try:
            made[name] = kind.write(source, asked, source.folder / FILES[name])
            forms[name] = Form(kind.load(source.folder / FILES[name]), kind.takes_whole)
        except (OSError, MemoryError):
            raise
        except Exception as error:  # noqa: BLE001  exporters and compilers fail in many ways
            left_out[name] = formats.reason(error)
    told, failed = measure(forms, source.split, source.info, source.result) if forms else ({}, {})
    before = said_before(source.evaluation, source.result) if told else {}
    found = [_measured(name, told[name], before, source, made[name]) for name in told]
    left_out |= failed
    for one in found:
        if -one.gain > asked.max_variant_drop:
            left_out[one.name] = (
                f"it loses {-one.gain:.4f} of the accuracy, {asked.max_variant_drop:g} is allowed "
                "(max_variant_drop)"
            )
    for unmade, why in left_out.items():
        (source.folder / FILES[unmade]).unlink(missing_ok=True)
        print(f"warning: {unmade} is left out: {why}", flush=True)
    stay = [one for one in found if one.name not in left_out]
    return Record(variants=stay, left_out=left_out), {
        one.file: forms[one.name].predict for one in stay
    }


def _needed(source: Source, file: str) -> Path:
    path = source.folder / file
    if not path.exists():
        raise InputError(f"it is made from {file}, which the model cannot be written in")
    return path


def _measured(
    name: str, told: Told, before: Mapping[str, tuple[str, str]], source: Source, made: Made
) -> Measured:
    """The record of a form; `before` has target and the checkpoint's class of each sample."""
    pairs = [(*before[path], now) for path, now in told.predicted.items()]
    won = sum(was != target == now for target, was, now in pairs)
    lost = sum(was == target != now for target, was, now in pairs)
    low, high = newcombe(told.evaluation.correct, source.result.correct, won, len(pairs))
    return Measured(
        name=name,
        file=FILES[name],
        size=(source.folder / FILES[name]).stat().st_size,
        evaluation=told.evaluation,
        agreement=sum(was == now for _, was, now in pairs) / len(pairs),
        gain=(won - lost) / len(pairs),
        low=low,
        high=high,
        won=won,
        lost=lost,
        made=made,
    )
