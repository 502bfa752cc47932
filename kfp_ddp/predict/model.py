"""The model of a bundle, in ONNX Runtime where that is installed, else in torch."""

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kfp_ddp.core.errors import InputError
from kfp_ddp.models import onnx_runtimes
from kfp_ddp.models.onnx_runtimes import ONNXRUNTIME, Logits
from kfp_ddp.models.open_bundle import open_bundle
from kfp_ddp.predict.picture import square

Floats = NDArray[np.float32]
_LARGEST = 1 << 20
_LARGEST_MODEL = 16 << 30


@dataclass(frozen=True)
class Model:
    """Called with paths of pictures it returns probabilities, float64 [pictures, classes]."""

    classes: tuple[str, ...]
    short_side: int
    """Pixels that the shorter side of a picture is resized to."""
    size: int
    """Pixels of the square that is cut out of its centre."""
    runtime: str
    """What computes: onnxruntime or torch."""
    logits: Logits
    """Of uint8 images [N, 3, size, size] in RGB."""

    def __call__(self, pictures: Sequence[str | Path]) -> NDArray[np.float64]:
        """The probability of each class for each picture.

        Raises:
            InputError: a picture cannot be read.
        """
        squares = [square(Path(picture), self.short_side, self.size) for picture in pictures]
        logits = self.logits(np.stack(squares)).astype(np.float64)
        powers = np.exp(logits - logits.max(1, keepdims=True))
        probabilities: NDArray[np.float64] = powers / powers.sum(1, keepdims=True)
        return probabilities


def load(bundle: str) -> Model:
    """The model of a bundle, each of whose files that is read is what its manifest lists.

    Args:
        bundle: Folder or address of a bundle, of a run's results, or of a model's exports, which
            stands for the champion.

    Raises:
        InputError: there is no whole bundle, or nothing here can compute it.
    """
    sealed = open_bundle(bundle)

    def read(name: str, limit: int) -> bytes:
        content = sealed.read(name, limit)
        if content is None:
            raise sealed.damaged(f"{name} is missing")
        return content

    classes = json.loads(read("classes.json", _LARGEST))
    signature: dict[str, Any] = json.loads(read("signature.json", _LARGEST))
    loaders: dict[str, tuple[str, Callable[[bytes], Logits]]] = {
        "model.onnx": (ONNXRUNTIME, onnx_runtimes.load),
        "model.pt2": ("torch", _program),
    }
    usable = {name: loader for name, loader in loaders.items() if name in (sealed.listed or ())}
    for name, (runtime, loader) in usable.items():
        if find_spec(runtime):
            short, size = (
                signature["preprocessing"]["short_side"],
                signature["inputs"][0]["shape"][2],
            )
            logits = loader(read(name, _LARGEST_MODEL))
            return Model(tuple(classes), short, size, runtime, logits)
    raise InputError(
        f"{bundle} needs {' or '.join(one for one, _ in usable.values())}: pip install onnxruntime"
        if usable
        else f"{bundle} has neither {' nor '.join(loaders)}, so it cannot be computed here"
    )


def _program(content: bytes) -> Logits:
    import torch

    module = torch.export.load(io.BytesIO(content)).module()

    def logits(images: NDArray[np.uint8]) -> Floats:
        with torch.inference_mode():
            found: Floats = module(torch.from_numpy(images)).numpy()
        return found

    return logits
