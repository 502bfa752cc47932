"""An int8 form of an ONNX file: static quantisation by ONNX Runtime, in its QDQ form.

Weights are int8 with a scale for each channel, activations uint8, which x86 with VNNI computes
fastest; their ranges are the smallest and largest values that training images came to.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from kfp_ddp.core.errors import InputError
from kfp_ddp.export.formats import INPUT, save_onnx
from kfp_ddp.training.checkpoint import ModelInfo
from kfp_ddp.training.data import evaluation_batches
from kfp_ddp.training.sides import TRAIN
from kfp_ddp.training.splits import sides_of

BATCH = 8
# What computes in int8, and what only hands numbers on, so that they need not become float32.
_QUANTISED = (
    *("Conv", "Gemm", "MatMul", "Add", "Relu", "Clip", "Concat"),
    *("MaxPool", "AveragePool", "GlobalAveragePool"),
)
_WEIGHTED = ("Conv", "Gemm", "MatMul")
_PREPARED = "onnx.infer"


def calibration(dataset: Path, info: ModelInfo, count: int) -> Iterator[Tensor]:
    """Up to `count` training images, evenly chosen, as the evaluation sees them.

    Raises:
        InputError: there are none that can be read.
    """
    index, _ = sides_of(dataset, TRAIN, info.classes, info.config)
    count = min(count, len(index))
    chosen = index.only([at * len(index) // count for at in range(count)])
    reading: dict[str, Any] = {"on_bad_image": info.on_bad_image, "max_pixels": info.max_pixels}
    for images, _, _ in evaluation_batches(chosen, info.image_size, BATCH, **reading):
        yield images.contiguous()


def write(source: Path, target: Path, images: Iterable[Tensor]) -> int:
    """Write the int8 form of an ONNX file; how many images it was calibrated on.

    Raises:
        InputError: there was none.
    """
    import onnx
    from onnxruntime.quantization import (
        CalibrationDataReader,
        QuantFormat,
        QuantType,
        quantize_static,
    )

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.count, self.batches = 0, iter(images)

        def get_next(self) -> dict[str, Any] | None:
            batch = next(self.batches, None)
            self.count += 0 if batch is None else len(batch)
            return None if batch is None else {INPUT: batch.numpy()}

    model: Any = onnx.load(source)
    kinds = [node.op_type in _WEIGHTED for node in model.graph.node]
    first = kinds.index(True) if True in kinds else len(kinds)
    normalisation = [node.name for node in model.graph.node[:first]]
    told = list(model.metadata_props)
    # The exporter has folded what ONNX Runtime's preparation would, and warns that nobody did.
    onnx.helper.set_model_props(model, {_PREPARED: "onnxruntime.quant"})
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
    quantised.metadata_props.extend(told)
    save_onnx(quantised, target)
    return reader.count
