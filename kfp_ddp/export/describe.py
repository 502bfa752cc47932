"""What a bundle says of its model: signature, configuration, and what it was made from."""

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from kfp_ddp.export.formats import INPUT, MAX_BATCH, OUTPUT
from kfp_ddp.models import bundle
from kfp_ddp.training import model_file
from kfp_ddp.training.checkpoint import ModelInfo
from kfp_ddp.training.transforms import short_side

_PACKAGES = ("kfp-ddp", "torch", "torchvision", "onnx", "onnxscript", "onnxruntime", "safetensors")


def signature(info: ModelInfo) -> dict[str, Any]:
    """Input and output of the graphs, and what has to happen to an image before and after."""
    size, short = info.image_size, short_side(info.image_size)
    return {
        "inputs": [
            {
                "name": INPUT,
                "dtype": "uint8",
                "shape": ["batch", 3, size, size],
                "layout": "NCHW",
                "channels": "RGB",
                "range": [0, 255],
            }
        ],
        "outputs": [
            {"name": OUTPUT, "dtype": "float32", "shape": ["batch", len(info.classes)]},
        ],
        "dynamic": {"batch": {"min": 1, "max": MAX_BATCH}},
        "preprocessing": {
            "before": [
                "decode to RGB, turned as EXIF says",
                f"resize the shorter side to {short}, bilinear with antialiasing",
                f"cut out the centre, {size} x {size}",
            ],
            "short_side": short,
            "in_graph": {"scale": 1 / 255, "mean": list(info.mean), "std": list(info.std)},
        },
        "postprocessing": "softmax over the logits; their order is that of classes.json",
    }


def config(info: ModelInfo, made_of: dict[str, Any]) -> dict[str, Any]:
    """How the model was trained and exported."""
    own = {"model_sha256": model_file.digest(info.model_code)} if info.model_code else {}
    return {
        "model": info.model,
        **own,
        "image_size": info.image_size,
        "classes": len(info.classes),
        "step": info.step,
        "training": info.config,
        "export": {"made_of": made_of, "key": bundle.key(made_of), "versions": versions()},
    }


def versions() -> dict[str, str]:
    """Installed versions of the packages that shape a bundle."""
    found = {}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
