"""The files of a bundle as functions, each loaded from disk by the runtime that serves it."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from kfp_ddp.core.errors import InputError
from kfp_ddp.export.formats import ONNX, PROGRAM, Servable
from kfp_ddp.models import weights
from kfp_ddp.models.bundle import WEIGHTS
from kfp_ddp.models.onnx_runtimes import ONNXRUNTIME, OPENVINO, load
from kfp_ddp.training.checkpoint import load_model

IN_OPENVINO = f"{ONNX} in OpenVINO"
Predict = Callable[[Tensor], Tensor]  # uint8 images (N, 3, S, S) to float32 logits (N, C)


def from_checkpoint(checkpoint: Path) -> Predict:
    """The checkpoint itself in eager torch: what all others are held against."""
    return eager(Servable(*load_model(checkpoint)))


def from_bundle(folder: Path) -> Mapping[str, Predict]:
    """A function for each file of weights in `folder`, by the file's name.

    Where OpenVINO is installed, the ONNX file is a second time there, computed by other code.
    """
    found = {WEIGHTS: eager(Servable(*weights.read(folder / WEIGHTS, step=0)))}
    if (folder / PROGRAM).exists():
        found[PROGRAM] = eager(torch.export.load(folder / PROGRAM).module())
    if (folder / ONNX).exists():
        found[ONNX] = onnx(folder / ONNX)
        if find_spec(OPENVINO):
            with suppress(InputError):  # it lacks an operator, and is not what the bundle is for
                found[IN_OPENVINO] = onnx(folder / ONNX, OPENVINO)
    return found


def eager(module: Callable[[Tensor], Tensor]) -> Predict:
    """A torch module, without gradients."""

    def predict(images: Tensor) -> Tensor:
        with torch.inference_mode():
            return module(images)

    return predict


def onnx(path: Path, runtime: str = ONNXRUNTIME) -> Predict:
    """An ONNX file in a runtime on the CPU, with as many threads as torch has."""
    loaded = load(path.read_bytes(), runtime, torch.get_num_threads())

    def predict(images: Tensor) -> Tensor:
        return torch.from_numpy(loaded(images.numpy()))

    return predict
