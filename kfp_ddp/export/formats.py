"""A checkpoint's model in the formats of a bundle: safetensors, torch.export and ONNX."""

import io
import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kfp_ddp.core.errors import InputError, KfpDdpError
from kfp_ddp.core.log import log
from kfp_ddp.core.packed import unpack
from kfp_ddp.models import weights
from kfp_ddp.models.bundle import CODE, ONNX, PROGRAM, WEIGHTS
from kfp_ddp.models.onnx_runtimes import load
from kfp_ddp.training.model.networks import logits, normalise
from kfp_ddp.training.state.checkpoint import ModelInfo, load_model

INPUT = "images"
OUTPUT = "logits"
# What ONNX Runtime 1.15 reads, the one in Triton 23.05 that KServe installs by default.
OPSET = 18
IR_VERSION = 8
MAX_BATCH = 1024
"""Images that a program computes at once."""

Predict = Callable[[Tensor], Tensor]
"""uint8 images (N, 3, S, S) to float32 logits (N, C)."""


class Servable(nn.Module):
    """A model with its normalisation: uint8 images (N, 3, S, S) to float32 logits (N, C)."""

    def __init__(self, model: nn.Module, info: ModelInfo) -> None:
        super().__init__()
        self.model = model
        self.mean = info.mean
        self.std = info.std
        self.test_time_flip = info.test_time_flip

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        return logits(self.model, normalise(images, self.mean, self.std), self.test_time_flip)


class HalfServable(Servable):
    """The same with a network in float16; normalisation and logits stay in float32."""

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        pixels = normalise(images, self.mean, self.std).half()
        return logits(self.model, pixels, self.test_time_flip).float()


def write_all(model: nn.Module, info: ModelInfo, folder: Path) -> dict[str, str]:
    """Write `WEIGHTS`, `PROGRAM` and `ONNX`; return why formats cannot be written, by format."""
    if any(module.training for module in model.modules()):
        raise ValueError("the model is in training mode: batch norm would be traced as in training")
    weights.write(model, info, folder / WEIGHTS)
    if info.model_code:
        (folder / CODE).write_bytes(unpack(info.model_code, "model_code"))
    try:
        program = trace(Servable(model, info).eval(), info.image_size)
    except Exception as error:
        raise _unsupported(info, f"torch.export does not trace it: {reason(error)}") from error
    left_out: dict[str, str] = {}
    writers: dict[str, Callable[[Path], None]] = {
        PROGRAM: lambda path: write_program(program, path),
        ONNX: lambda path: write_onnx(program, info, path),
    }
    for name, write in writers.items():
        path = folder / name
        try:
            write(path)
        except (OSError, MemoryError):
            raise
        except Exception as error:  # noqa: BLE001  exporters raise many errors
            path.unlink(missing_ok=True)
            left_out[path.name] = reason(error)
            log.warning(f"{path.name} is left out: {left_out[path.name]}")
    if len(left_out) == 2:
        raise _unsupported(info, "; ".join(f"{name}: {why}" for name, why in left_out.items()))
    return left_out


def _unsupported(info: ModelInfo, why: str) -> InputError:
    return InputError(
        f"{info.model} can be written neither as {PROGRAM} nor as {ONNX}: {why}; change the "
        "network, as branches on values to torch.where"
    )


def reason(error: BaseException) -> str:
    """Return the first cause of an exporter's error in one line, without its advice."""
    if isinstance(error, KfpDdpError):
        return str(error)
    while error.__cause__ is not None:
        error = error.__cause__
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first.strip()[:250]}"


def trace(servable: Servable, image_size: int) -> Any:
    """Return a `torch.export` program for batches of 1 to `MAX_BATCH`."""
    # With an example of one image torch.export makes the batch a constant.
    example = torch.zeros(2, 3, image_size, image_size, dtype=torch.uint8)
    shapes = {INPUT: {0: torch.export.Dim("batch", min=1, max=MAX_BATCH)}}
    with torch.no_grad():
        return torch.export.export(servable, (example,), dynamic_shapes=shapes, strict=False)


def write_program(program: Any, path: Path) -> None:
    """Write a program; on a full disk `torch.export.save` itself would abort the process."""
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    path.write_bytes(buffer.getbuffer())


def write_onnx(program: Any, info: ModelInfo, path: Path) -> None:
    """Write a program as ONNX, without the local file paths that the exporter adds."""
    import onnx

    with warnings.catch_warnings():
        # The exporter uses deprecated functions.
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        converted = torch.onnx.export(
            program,
            (),
            dynamo=True,
            opset_version=OPSET,
            input_names=[INPUT],
            output_names=[OUTPUT],
            verbose=False,
        )
    if converted is None:
        raise RuntimeError("torch.onnx gave no program")
    proto: Any = converted.model_proto
    graph = proto.graph
    proto.producer_version = torch.__version__
    symbol = graph.input[0].type.tensor_type.shape.dim[0].dim_param
    for value in (*graph.input, *graph.output, *graph.value_info):
        del value.metadata_props[:]
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param == symbol:
                dim.dim_param = "batch"
    for item in (graph, *graph.node, *graph.initializer):
        del item.metadata_props[:]
    del proto.metadata_props[:]
    onnx.helper.set_model_props(
        proto,
        {
            "classes": json.dumps(list(info.classes)),
            "model": info.model,
            "image_size": str(info.image_size),
        },
    )
    save_onnx(proto, path)


def save_onnx(proto: Any, path: Path) -> None:
    """Check a model and write it for the supported runtimes, always as the same bytes."""
    import onnx

    proto.ir_version = IR_VERSION
    onnx.checker.check_model(proto)
    path.write_bytes(proto.SerializeToString(deterministic=True))


def from_checkpoint(checkpoint: Path) -> Predict:
    """Return the checkpoint in eager torch, the reference for all formats."""
    return eager(Servable(*load_model(checkpoint)))


def from_bundle(folder: Path) -> Mapping[str, Predict]:
    """Return a function for each model file in `folder`, by name."""
    functions = {WEIGHTS: eager(Servable(*weights.read(folder / WEIGHTS, 0, allow_code=True)))}
    if (folder / PROGRAM).exists():
        functions[PROGRAM] = eager(torch.export.load(folder / PROGRAM).module())
    if (folder / ONNX).exists():
        functions[ONNX] = onnx_predict(folder / ONNX)
    return functions


def eager(module: Callable[[Tensor], Tensor]) -> Predict:
    """Return a torch module as a function without gradients."""

    def predict(images: Tensor) -> Tensor:
        with torch.inference_mode():
            return module(images)

    return predict


def onnx_predict(path: Path) -> Predict:
    """Return an ONNX file as a function, on the CPU with the threads of torch."""
    loaded = load(path.read_bytes(), torch.get_num_threads())

    def predict(images: Tensor) -> Tensor:
        return torch.from_numpy(loaded(images.numpy()))

    return predict
