"""The int8 form of an ONNX file.

It is static, QDQ, with a scale for each channel, which x86 with VNNI computes fastest.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from kfp_ddp.core.errors import InputError
from kfp_ddp.export.formats import INPUT, save_onnx
from kfp_ddp.pictures.sides import TRAIN
from kfp_ddp.pictures.splits import sides_of
from kfp_ddp.training.data.loader import evaluation_batches
from kfp_ddp.training.state.checkpoint import ModelInfo

BATCH = 8
# Operators that compute in int8, and ones that only pass on numbers.
_QUANTISED = (
    *("Conv", "Gemm", "MatMul", "Add", "Relu", "Clip", "Concat"),
    *("MaxPool", "AveragePool", "GlobalAveragePool"),
)


def calibration(dataset: Path, info: ModelInfo, count: int) -> Iterator[Tensor]:
    """Yield up to `count` training images in batches, evenly spaced, as for evaluation."""
    index, _ = sides_of(dataset, TRAIN, info.classes, info.config)
    count = min(count, len(index))
    chosen = index.only([number * len(index) // count for number in range(count)])
    for images, *_ in evaluation_batches(chosen, info.image_size, BATCH, reading=info.reading):
        yield images.contiguous()


def write_int8(source: Path, target: Path, images: Iterable[Tensor]) -> int:
    """Write the int8 form of an ONNX file; return the number of calibration images, at least 1."""
    import onnx
    from onnxruntime.quantization import (
        CalibrationDataReader,
        QuantFormat,
        QuantType,
        quantize_static,
    )

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.count = 0
            self.batches = iter(images)

        def get_next(self) -> dict[str, Any] | None:
            batch = next(self.batches, None)
            self.count += 0 if batch is None else len(batch)
            return None if batch is None else {INPUT: batch.numpy()}

    model: Any = onnx.load(source)
    weighted = [node.op_type in ("Conv", "Gemm", "MatMul") for node in model.graph.node]
    first = weighted.index(True) if True in weighted else len(weighted)
    normalisation = [node.name for node in model.graph.node[:first]]
    properties = list(model.metadata_props)
    # ONNX Runtime warns without this; its preparation has no effect after the exporter's.
    onnx.helper.set_model_props(model, {"onnx.infer": "onnxruntime.quant"})
    reader = Reader()
    try:
        quantize_static(
            model,
            target,
            reader,
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=list(_QUANTISED),
            nodes_to_exclude=normalisation,
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
        )
    except ValueError:
        if not reader.count:
            raise InputError("none of the training images can be read") from None
        raise
    quantised: Any = onnx.load(target)
    del quantised.metadata_props[:]
    quantised.metadata_props.extend(properties)
    save_onnx(quantised, target)
    return reader.count
