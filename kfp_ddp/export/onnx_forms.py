"""Further forms of an ONNX file: one in int8, and one that takes decoded images of any size.

int8 is static, QDQ, with a scale for each channel, which x86 with VNNI computes fastest.
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
from kfp_ddp.training.data.transforms import short_side
from kfp_ddp.training.state.checkpoint import ModelInfo

BATCH = 8
_SQUARE = "square"
# Operators that compute in int8, and ones that only pass on numbers.
_QUANTISED = (
    *("Conv", "Gemm", "MatMul", "Add", "Relu", "Clip", "Concat"),
    *("MaxPool", "AveragePool", "GlobalAveragePool"),
)


def calibration(dataset: Path, info: ModelInfo, count: int) -> Iterator[Tensor]:
    """Yield up to `count` training images in batches, evenly spaced, as for evaluation."""
    index, _ = sides_of(dataset, TRAIN, info.classes, info.config)
    count = min(count, len(index))
    chosen = index.only([at * len(index) // count for at in range(count)])
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
            self.count, self.batches = 0, iter(images)

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


def write_resize(source: Path, target: Path, image_size: int, crop: float = 0.0) -> None:
    """Write the form of `source` whose input is uint8 [batch, 3, height, width]."""
    import onnx

    model: Any = onnx.load(source)
    graph = model.graph
    for node in graph.node:
        node.input[:] = [_SQUARE if name == INPUT else name for name in node.input]
    nodes = list(graph.node)
    del graph.node[:]
    graph.node.extend([*_resize_nodes(), *nodes])
    graph.initializer.extend(_constants(image_size, crop))
    for axis, name in ((2, "height"), (3, "width")):
        graph.input[0].type.tensor_type.shape.dim[axis].dim_param = name
    save_onnx(model, target)


def _resize_nodes() -> list[Any]:
    """Return the graph from `INPUT` to `_SQUARE`, as `transforms.evaluate`; sizes in float64."""
    from onnx import TensorProto, helper

    def node(kind: str, inputs: str, output: str, **more: Any) -> Any:
        names = [name.strip("-") for name in inputs.split()]
        return helper.make_node(kind, names, [output], name=output, **more)

    return [
        node("Shape", INPUT, "input_sides", start=2, end=4),
        node("ReduceMin", "input_sides", "input_short", keepdims=1),
        node("Cast", "input_sides", "input_f", to=TensorProto.DOUBLE),
        node("Cast", "input_short", "input_short_f", to=TensorProto.DOUBLE),
        node("Div", "short_f input_short_f", "scale"),
        node("Mul", "input_f scale", "scaled"),
        node("Round", "scaled", "rounded"),
        node("Cast", "rounded", "rounded_i", to=TensorProto.INT64),
        node("Max", "rounded_i short", "sides"),
        node(
            "Resize",
            f"{INPUT} - - sides",
            "resized",
            mode="linear",
            antialias=1,
            exclude_outside=1,
            axes=[2, 3],
            coordinate_transformation_mode="half_pixel",
        ),
        node("Sub", "sides size", "margin"),
        node("Div", "margin two", "begin"),
        node("Add", "begin size", "end"),
        node("Slice", "resized begin end crop_axes", _SQUARE),
    ]


def _constants(image_size: int, crop: float) -> list[Any]:
    from onnx import TensorProto, helper

    short = short_side(image_size, crop)
    values = {"short": [short], "size": [image_size] * 2, "two": [2], "crop_axes": [2, 3]}
    return [
        helper.make_tensor("short_f", TensorProto.DOUBLE, [1], [float(short)]),
        *(helper.make_tensor(n, TensorProto.INT64, [len(v)], v) for n, v in values.items()),
    ]
