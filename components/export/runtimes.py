"""The files of a bundle as functions, each loaded from disk by the runtime that serves it."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from kfp_ddp.components.export.formats import INPUT, ONNX, OUTPUT, PROGRAM, Servable
from kfp_ddp.components.shared import weights
from kfp_ddp.components.shared.bundle import WEIGHTS
from kfp_ddp.training.checkpoint import load_model

Predict = Callable[[Tensor], Tensor]  # uint8 images (N, 3, S, S) to float32 logits (N, C)


def from_checkpoint(checkpoint: Path) -> Predict:
    """The checkpoint itself in eager torch: what all others are held against."""
    return eager(Servable(*load_model(checkpoint)))


def from_bundle(folder: Path) -> Mapping[str, Predict]:
    """A function for each file of weights in `folder`, by the file's name."""
    found = {WEIGHTS: eager(Servable(*weights.read(folder / WEIGHTS, step=0)))}
    if (folder / PROGRAM).exists():
        found[PROGRAM] = eager(torch.export.load(folder / PROGRAM).module())
    if (folder / ONNX).exists():
        found[ONNX] = onnx(folder / ONNX)
    return found


def eager(module: Callable[[Tensor], Tensor]) -> Predict:
    """A torch module, without gradients."""

    def predict(images: Tensor) -> Tensor:
        with torch.inference_mode():
            return module(images)

    return predict


def onnx(path: Path) -> Predict:
    """An ONNX file in ONNX Runtime on the CPU, with as many threads as torch has."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def predict(images: Tensor) -> Tensor:
        return torch.from_numpy(session.run([OUTPUT], {INPUT: images.numpy()})[0])

    return predict
