"""The packages of an extra of this distribution."""

from importlib.util import find_spec

from kfp_ddp.core.errors import InputError

_LOCAL = (
    *("numpy", "PIL", "safetensors", "simplejpeg", "torch", "torchcodec", "torchvision"),
    *("onnx", "onnxruntime", "onnxscript", "psutil"),
)
_MODULES = {
    "predict": ("numpy", "PIL"),
    "serve": ("kserve", "numpy"),
    "local": _LOCAL,
    "monitor": ("tensorboard",),
    "sweep": ("optuna",),
    "huggingface": ("huggingface_hub",),
    "parquet": ("pyarrow",),
    "timm": ("timm",),
    "demo": (*_LOCAL, "gcp_storage_emulator", "requests", "sklearn"),
}


def require(extra: str, what: str = "this") -> None:
    """Check that `what` has the packages of an extra; InputError says how to install all."""
    for module in _MODULES[extra]:
        if find_spec(module) is None:
            raise InputError(
                f"{what} needs {module}, which is not installed: pip install 'kfp-ddp[{extra}]', "
                f"or in a checkout pip install '.[{extra}]'"
            )
