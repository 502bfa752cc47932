"""Whether what a command needs beside the base install is there."""

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
    "demo": (*_LOCAL, "gcp_storage_emulator", "requests", "sklearn"),
}


def require(extra: str) -> None:
    """Refuse to begin without the packages of an extra.

    Raises:
        InputError: naming the first that is missing, and how to get all.
    """
    for module in _MODULES[extra]:
        if find_spec(module) is None:
            raise InputError(
                f"this needs {module}, which is not installed: pip install 'kfp-ddp[{extra}]', "
                f"or in a checkout pip install '.[{extra}]'"
            )
