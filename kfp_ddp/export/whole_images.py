"""A form of an ONNX file that takes whole decoded images, resizes them and cuts out the centre.

ONNX decodes no JPEG that ONNX Runtime could read: ImageDecoder, of opset 20, has no kernel there.
"""

from pathlib import Path
from typing import Any

from kfp_ddp.export.formats import INPUT, save_onnx
from kfp_ddp.training.transforms import short_side

_SQUARE = "square"


def write(source: Path, target: Path, image_size: int) -> None:
    """Write the form of `source` whose input is uint8 [batch, 3, height, width]."""
    import onnx

    model: Any = onnx.load(source)
    graph = model.graph
    for node in graph.node:
        node.input[:] = [_SQUARE if name == INPUT else name for name in node.input]
    computed = list(graph.node)
    del graph.node[:]
    graph.node.extend([*_nodes(), *computed])
    graph.initializer.extend(_constants(image_size))
    for axis, name in ((2, "height"), (3, "width")):
        graph.input[0].type.tensor_type.shape.dim[axis].dim_param = name
    save_onnx(model, target)


def _nodes() -> list[Any]:
    """From `INPUT` to `_SQUARE`, as `transforms.evaluate`; sizes in float64, as Python has them."""
    from onnx import TensorProto, helper

    def node(kind: str, inputs: str, output: str, **more: Any) -> Any:
        names = [name.strip("-") for name in inputs.split()]
        return helper.make_node(kind, names, [output], name=output, **more)

    return [
        node("Shape", INPUT, "given", start=2, end=4),
        node("ReduceMin", "given", "given_short", keepdims=1),
        node("Cast", "given", "given_f", to=TensorProto.DOUBLE),
        node("Cast", "given_short", "given_short_f", to=TensorProto.DOUBLE),
        node("Div", "short_f given_short_f", "scale"),
        node("Mul", "given_f scale", "scaled"),
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
        node("Sub", "sides size", "left_over"),
        node("Div", "left_over two", "begin"),
        node("Add", "begin size", "end"),
        node("Slice", "resized begin end crop_axes", _SQUARE),
    ]


def _constants(image_size: int) -> list[Any]:
    from onnx import TensorProto, helper

    short = short_side(image_size)
    whole = {"short": [short], "size": [image_size] * 2, "two": [2], "crop_axes": [2, 3]}
    return [
        helper.make_tensor("short_f", TensorProto.DOUBLE, [1], [float(short)]),
        *(helper.make_tensor(n, TensorProto.INT64, [len(v)], v) for n, v in whole.items()),
    ]
