"""Classify pictures with the model of a bundle, without torch.

Prerequisite: the `predict` extra, and ONNX Runtime (or torch).

    from kfp_ddp.predict import load

    probabilities = load("bundle")(["picture.jpg"])
"""

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from kfp_ddp.core.errors import UNIX_ONLY, InputError
from kfp_ddp.core.text import one_line

try:
    from kfp_ddp.models.champion import open_bundle
except ModuleNotFoundError as error:
    if error.name not in ("fcntl", "resource"):
        raise
    raise ModuleNotFoundError(UNIX_ONLY, name=error.name) from None
from kfp_ddp.models import doubt, onnx_runtimes
from kfp_ddp.models.bundle import LARGEST_MODEL, ONNX, WEIGHTS, Bundle
from kfp_ddp.models.doubt import UNKNOWN, Thresholds
from kfp_ddp.models.interface import Interface, read_interface
from kfp_ddp.models.onnx_runtimes import ONNXRUNTIME, Logits
from kfp_ddp.pictures import decoder
from kfp_ddp.pictures.reading import PADDING, Reading
from kfp_ddp.pictures.shards import Where, content

if TYPE_CHECKING:
    from kfp_ddp.models.signature import Signer

Bytes = NDArray[np.uint8]
Box = tuple[float, float, float, float]
"""Left, top, right and bottom in pixels."""
Picture = str | Path | bytes | Image.Image | NDArray[Any]
"""A path, the content of a file, a picture of Pillow, or uint8 [H, W] or [H, W, 3] in RGB."""
_TORCH = ("torch", "torchvision", "safetensors")
_BATCH_DIMENSIONS = 4
_PARTS = 8
"""Places of a covered part along each side; it is two of them high and wide."""
_SHOWN_SIDE = 480
"""Least pixels of the longer side of a marked photograph."""
_MARK = (255, 120, 0)
"""Orange."""
_STRONGEST = 0.7 * 255
"""Opacity of the mark."""
_UNSEEN = 0.5
"""Brightness of what is outside of the square."""


@dataclass(frozen=True)
class Model:
    """A classifier: call it with pictures."""

    interface: Interface
    runtime: str
    """onnxruntime or torch."""
    logits: Logits
    """Function of uint8 images [N, 3, size, size] in RGB."""
    thresholds: Thresholds = UNKNOWN
    """Which of its predictions are sure."""

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes, in the order of the probabilities."""
        return self.interface.classes

    def __call__(self, pictures: Sequence[Picture]) -> NDArray[np.float64]:
        """Return the probability of each class for each picture: float64 [pictures, classes].

        Raise InputError if a picture cannot be read, or the model does not fit its description.
        """
        return softmax(self.scores(pictures))

    def scores(self, pictures: Sequence[Picture]) -> NDArray[np.float32]:
        """Return the logits: float32 [pictures, classes], for `softmax` and `thresholds.sure`."""
        flat = isinstance(pictures, np.ndarray) and pictures.ndim < _BATCH_DIMENSIONS
        if flat or isinstance(pictures, str | Path | bytes | Image.Image):
            raise InputError("one picture is not a list: give a list of pictures, as [picture]")
        if not len(pictures):
            return np.empty((0, len(self.classes)), np.float32)
        return self._scores(np.stack([self.square(picture) for picture in pictures]))

    def square(self, picture: Picture) -> Bytes:
        """Return the part of a picture that is classified; see `square`."""
        return square(picture, self.interface)

    def compute(self, squares: Bytes) -> NDArray[np.float64]:
        """Return the same for results of `square`, [N, 3, size, size]."""
        return softmax(self._scores(squares))

    def _scores(self, squares: Bytes) -> NDArray[np.float32]:
        try:
            logits = self.logits(squares)
        except Exception as error:
            raise InputError(
                f"{self.runtime} cannot compute pictures of {self.interface.size} pixels: "
                f"{one_line(error)}; export the model again"
            ) from error
        if logits.shape != (len(squares), len(self.classes)):
            raise InputError(
                f"the model gives logits of shape {list(logits.shape)} for {len(squares)} "
                f"picture(s) and {len(self.classes)} classes: export it again"
            )
        return logits

    def saliency(self, image: Bytes, label: int) -> NDArray[np.float64]:
        """Return how much a class depends on each pixel of a result of `square`: 0 to 1, [H, W].

        Parts are covered with the mean colour. What counts is how much less likely the class is
        then (occlusion, https://arxiv.org/abs/1311.2901), so it works for any model.
        """
        reach = self.interface.size / _PARTS
        centres = (np.arange(_PARTS) + 0.5) * self.interface.size / _PARTS
        sides = [slice(max(0, int(mid - reach)), int(mid + reach)) for mid in centres]
        before = self.compute(image[None])[0, label]
        drops = np.empty((_PARTS, _PARTS), np.float32)
        for row, rows in enumerate(sides):
            covered = np.stack([image] * _PARTS)
            for one, columns in zip(covered, sides, strict=True):
                one[:, rows, columns] = image.mean((1, 2))[:, None, None]
            drops[row] = before - self.compute(covered)[:, label]
        smooth = Image.fromarray(drops).resize(
            (self.interface.size, self.interface.size), Image.Resampling.BILINEAR
        )
        heat: NDArray[np.float64] = np.clip(np.asarray(smooth, np.float64), 0, None)
        heat /= max(heat.max(), np.finfo(float).tiny)
        return heat

    def explain(self, picture: Picture, label: int) -> Image.Image:
        """Return a grey photograph that is orange where a class depends on it, by `saliency`.

        It has its own size, or more if it is small. What is outside of the square is darker.
        """
        heat = self.saliency(self.square(picture), label)
        mask = Image.fromarray((heat * _STRONGEST).astype(np.uint8))
        photograph = _decode(picture, self.interface.reading).convert("L")
        scale = max(1.0, _SHOWN_SIDE / max(photograph.size))
        size = [max(1, round(side * scale)) for side in photograph.size]
        photograph = photograph.resize((size[0], size[1]), Image.Resampling.BICUBIC)
        left, top, right, bottom = _seen(photograph.size, self.interface)
        box = (math.floor(left), math.floor(top), math.ceil(right), math.ceil(bottom))
        seen = photograph.crop(box).convert("RGB")
        seen.paste(_MARK, mask=mask.resize(seen.size, Image.Resampling.BILINEAR))
        whole = photograph.point(lambda value: value * _UNSEEN).convert("RGB")
        whole.paste(seen, box)
        return whole


def softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the probabilities, float64 [N, classes]."""
    powers = np.exp(logits.astype(np.float64) - logits.max(1, keepdims=True))
    probabilities: NDArray[np.float64] = powers / powers.sum(1, keepdims=True)
    return probabilities


def ranking(
    classes: Sequence[str], probabilities: NDArray[np.float64], top: int | None = None
) -> list[dict[str, Any]]:
    """Return the names and probabilities of the likeliest classes, for JSON."""
    order = (-probabilities).argsort(kind="stable")[:top]
    return [{"class": classes[at], "probability": float(probabilities[at])} for at in order]


def load(bundle: str, signer: "Signer | None" = None, *, allow_code: bool = False) -> Model:
    """Return the model of a bundle; each file that is read is verified by the manifest.

    `bundle` is the folder or URI of a bundle, of a run's results, or of a model's exports (then the
    champion); `signer` is of `kfp_ddp.models.signature`, None for any. Without `model.onnx` or ONNX
    Runtime torch builds the network again, by its own code only with `allow_code`. Raise InputError
    if the bundle is missing, incomplete or not signed, or it cannot be computed here.
    """
    sealed = open_bundle(bundle, signer=signer)
    interface = read_interface(sealed)
    thresholds = doubt.read(sealed)
    if ONNX in sealed.listed and find_spec(ONNXRUNTIME):
        content = sealed.read(ONNX, LARGEST_MODEL) or b""
        return Model(interface, ONNXRUNTIME, onnx_runtimes.load(content), thresholds)
    if WEIGHTS in sealed.listed and all(map(find_spec, _TORCH)):
        return Model(interface, _TORCH[0], _in_torch(sealed, allow_code), thresholds)
    needed = {ONNX: ONNXRUNTIME, WEIGHTS: " ".join(_TORCH)}
    commands = [f"pip install {names}" for file, names in needed.items() if file in sealed.listed]
    if not commands:
        raise InputError(f"{bundle} has neither {ONNX} nor {WEIGHTS}: export the model again")
    raise InputError(f"{bundle} cannot be computed here: {' or '.join(commands)}")


def _in_torch(bundle: Bundle, allow_code: bool) -> Logits:
    """Return the function of the network that the weights describe, on the CPU."""
    import torch

    from kfp_ddp.export.formats import Servable, eager
    from kfp_ddp.models import weights

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, WEIGHTS)
        file.write_bytes(bundle.read(WEIGHTS, LARGEST_MODEL) or b"")
        network = eager(Servable(*weights.read(file, 0, allow_code=allow_code)).eval())
    return lambda squares: network(torch.from_numpy(squares)).numpy()


def square(picture: Picture, interface: Interface) -> Bytes:
    """Return the square that stands for a picture: uint8 [3, size, size], RGB.

    Values differ from those of torchvision by 2 of 255 at most. Raise InputError if the picture
    cannot be read.
    """
    image = _decode(picture, interface.reading)
    size = interface.size
    if interface.reading.fit == "pad":
        return np.asarray(_padded(image, size)).transpose(2, 0, 1)
    # Only the crop is computed: a very long and narrow picture would not fit into memory.
    box = _seen(image.size, interface)
    crop = image.resize((size, size), Image.Resampling.BILINEAR, box)
    return np.asarray(crop).transpose(2, 0, 1)


def _padded(image: Image.Image, size: int) -> Image.Image:
    """Return all of a picture between bars of PADDING."""
    scale = size / max(image.size)
    width, height = (max(1, round(side * scale)) for side in image.size)
    whole = Image.new("RGB", (size, size), PADDING)
    smaller = image.resize((width, height), Image.Resampling.BILINEAR)
    # Odd bars are rounded as in the training.
    whole.paste(smaller, (-((width - size) // 2), -((height - size) // 2)))
    return whole


def _seen(sides: tuple[int, int], interface: Interface) -> Box:
    """Return the part of a picture of these sides that is classified; with bars, more than it."""
    fit = interface.reading.fit
    if fit == "squash":
        return 0.0, 0.0, float(sides[0]), float(sides[1])
    if fit == "pad":
        longer = max(sides)
        left, top = ((side - longer) / 2 for side in sides)
        return left, top, left + longer, top + longer
    short_side = interface.short_side
    scale = short_side / min(sides)
    box = [0.0, 0.0, 0.0, 0.0]
    for axis, length in enumerate(sides):
        resized = max(short_side, round(length * scale))
        start = (resized - interface.size) // 2
        box[axis], box[axis + 2] = (at * length / resized for at in (start, start + interface.size))
    return box[0], box[1], box[2], box[3]


def _decode(picture: Picture, reading: Reading) -> Image.Image:
    """Return the picture in RGB, rotated according to its EXIF data."""
    title = picture if isinstance(picture, str | Path) else "the picture"
    try:
        if isinstance(picture, np.ndarray):
            if picture.dtype != np.uint8:  # Pillow takes fractions from 0 to 1 for black
                raise ValueError(f"its values are {picture.dtype}, not uint8")
            picture = Image.fromarray(picture)
        if isinstance(picture, Image.Image):
            return decoder.to_rgb(picture, reading)
        if not isinstance(picture, bytes):
            picture = content(Where(str(picture)), reading.most_bytes)
        return Image.fromarray(decoder.decode(picture, reading)[0])
    except (OSError, TypeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"cannot read {title} ({reason}): give a picture, such as a JPEG or a PNG"
        ) from None
