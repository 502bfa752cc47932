"""ONNX models in ONNX Runtime, on the CPU."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
from numpy.typing import NDArray

from kfp_ddp.core import machine
from kfp_ddp.core.errors import InputError

Logits = Callable[[NDArray[np.uint8]], NDArray[np.float32]]
ONNXRUNTIME = "onnxruntime"


@dataclass(frozen=True)
class Loaded:
    """A model with one input and one output, called with uint8 images; one call at a time."""

    runtime: str
    """Name and version of the runtime."""
    entry: tuple[str, tuple[int, ...]]
    """Name and shape of the input; -1 for any size."""
    output: tuple[str, tuple[int, ...]]
    logits: Logits

    def __call__(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return the logits, float32 [N, classes]."""
        return self.logits(images)


def load(model: bytes, threads: int = 0) -> Loaded:
    """Load a model from the content of an ONNX file; InputError if it is refused.

    `threads` is 0 for one per core. Names of files in the model mean nothing to the runtime, which
    finds no other file where it looks.
    """
    try:
        _check("model", memoryview(model))
    except (LookupError, ValueError, RecursionError) as error:
        why = str(error) if isinstance(error, ValueError) else "damaged parts"
        raise InputError(f"the ONNX model is refused, as it has {why}: export it again") from None
    if not find_spec(ONNXRUNTIME):
        raise InputError(f"this needs {ONNXRUNTIME}, which is missing: pip install {ONNXRUNTIME}")
    try:
        return _loaded(model, threads or machine.threads())
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        why = lines[-1][:250] if lines else repr(error)[:250]
        raise InputError(
            f"{ONNXRUNTIME} cannot load the model: {why}; try another version "
            "of it, or export the model again"
        ) from error


def _loaded(model: bytes, threads: int) -> Loaded:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    options.add_session_config_entry("session.load_model_format", "ONNX")
    # The folder of files that a model names: nothing can be below it.
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", os.devnull
    )
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    (entry,) = session.get_inputs()
    (output,) = session.get_outputs()

    def logits(images: NDArray[np.uint8]) -> NDArray[np.float32]:
        result: NDArray[np.float32] = session.run([output.name], {entry.name: images})[0]
        return result

    return Loaded(
        f"onnxruntime {onnxruntime.__version__}",
        (entry.name, _fixed(entry.shape)),
        (output.name, _fixed(output.shape)),
        logits,
    )


def _fixed(shape: list[int | str]) -> tuple[int, ...]:
    return tuple(size if isinstance(size, int) else -1 for size in shape)


_FIELDS: dict[str, dict[int, str]] = {
    "model": dict.fromkeys((1, 2, 3, 4, 5, 6, 8, 14), "") | {7: "graph"},
    "graph": dict.fromkeys((2, 10, 11, 12, 13, 14, 16), "") | {1: "node", 5: "tensor"},
    "node": dict.fromkeys((1, 2, 3, 4, 6, 9), "") | {5: "attribute"},
    "attribute": dict.fromkeys((1, 2, 3, 4, 7, 8, 9, 13, 20), "")
    | {5: "tensor", 6: "graph", 10: "tensor", 11: "graph"},
    "tensor": dict.fromkeys((1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12, 16), ""),
}
"""Allowed fields of the messages of onnx.proto by number; '' where no tensor can be in them.

Left out are external data of tensors, and what export does not write: sparse tensors, functions,
training, and operators of other domains than ONNX's own.
"""

# The wire types of protobuf.
_VARINT = 0
_SIZED = 2
_FIXED_SIZES = {1: 8, 5: 4}
"""Bytes of those of one size."""


def _check(kind: str, message: memoryview) -> None:
    """Raise unless a message has allowed fields in their only spelling, as runtimes read others."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        field = tag >> 3
        wire_type = tag & 7
        inner = _FIELDS[kind].get(field)
        if inner is None:
            raise ValueError(f"field {field} of a {kind}, such as weights in other files")
        if wire_type == _VARINT:
            size = 0
            at = _varint(message, at)[1]
        elif wire_type == _SIZED:
            size, at = _varint(message, at)
        else:
            size = _FIXED_SIZES[wire_type]
        if inner:
            if wire_type != _SIZED:
                raise ValueError(f"field {field} of a {kind} in another wire type")
            _check(inner, message[at : at + size])
        at += size
    if at != len(message):
        raise ValueError("a part without an end")


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """Return an integer and the position after it."""
    value = 0
    shift = 0
    while message[at] & 0x80:
        value |= (message[at] & 0x7F) << shift
        at += 1
        shift += 7
    has_empty_end = shift > 0 and not message[at]
    if shift > 63 or has_empty_end:
        raise ValueError("an integer in another spelling")
    return value | message[at] << shift, at + 1
