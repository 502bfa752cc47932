"""Whether TensorRT's parser takes an ONNX file, by the list of what it supports.

TensorRT itself is not asked: an engine is built where the GPU is, with the profile told here.
"""

from pathlib import Path
from typing import Any

from kfp_ddp.export.formats import INPUT

BATCHES = (1, 8, 64)
"""Least, usual and most images of the profile; the most is what Triton is told too."""
OPSETS = (9, 24)
# onnx-tensorrt, docs/operators.md of TensorRT 10.15; of uint8 only a network's input.
_TABLE = """Abs Acos Acosh Add And ArgMax ArgMin Asin Asinh Atan Atanh Attention AveragePool
BatchNormalization Cast CastLike Ceil Celu Clip Concat Constant ConstantOfShape Conv
ConvTranspose Cos Cosh CumSum DeformConv DepthToSpace Div Dropout Einsum Elu Equal Erf Exp
Expand EyeLike Flatten Floor Gather GatherElements GatherND Gelu Gemm GlobalAveragePool
GlobalLpPool GlobalMaxPool Greater GreaterOrEqual GridSample GroupNormalization HardSigmoid
HardSwish Hardmax Identity If InstanceNormalization IsInf IsNaN LRN LayerNormalization LeakyRelu
Less LessOrEqual Log LogSoftmax Loop LpNormalization LpPool MatMul Max MaxPool Mean
MeanVarianceNormalization Min Mish Mod Mul Neg NonZero Not OneHot Or PRelu Pad Pow Range
Reciprocal ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin
ReduceProd ReduceSum ReduceSumSquare Relu Reshape RoiAlign Round Scan ScatterElements ScatterND
Selu Shape Shrink Sigmoid Sign Sin Sinh Size Slice Softmax Softplus Softsign SpaceToDepth Split
Sqrt Squeeze Sub Sum Tan Tanh ThresholdedRelu Tile TopK Transpose Trilu Unsqueeze Where Xor
"""
_OPERATORS = frozenset(_TABLE.split())


def described(path: Path, image_size: int) -> dict[str, Any]:
    """Whether an engine can be built from a file, why not, and the shapes to build it for."""
    import onnx

    model: Any = onnx.load(path, load_external_data=False)
    (opset,) = (each.version for each in model.opset_import if each.domain in ("", "ai.onnx"))
    names = {
        f"{node.domain}.{node.op_type}".removeprefix("ai.onnx").lstrip(".")
        for node in model.graph.node
    }
    against = [f"the operator {name}" for name in sorted(names - _OPERATORS)]
    if not OPSETS[0] <= opset <= OPSETS[1]:
        against.append(f"opset {opset}, it takes {OPSETS[0]} to {OPSETS[1]}")
    shapes = {
        f"{which}Shapes": f"{INPUT}:{batch}x3x{image_size}x{image_size}"
        for which, batch in zip(("min", "opt", "max"), BATCHES, strict=True)
    }
    flags = [f"--{name}={shape}" for name, shape in shapes.items()]
    return {
        "file": path.name,
        "of": "TensorRT 10.15",
        "takes_it": not against,
        "against_it": against,
        "opset": opset,
        "profile": shapes,
        "trtexec": " ".join(["trtexec", f"--onnx={path.name}", *flags]),
    }
