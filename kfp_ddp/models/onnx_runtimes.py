"""ONNX models in ONNX Runtime or OpenVINO, on the CPU."""

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kfp_ddp.core import machine
from kfp_ddp.core.errors import InputError

Logits = Callable[[NDArray[np.uint8]], NDArray[np.float32]]
ONNXRUNTIME, OPENVINO = "onnxruntime", "openvino"


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


def load(model: bytes, runtime: str = "", threads: int = 0) -> Loaded:
    """Load a model from the content of an ONNX file; InputError if it is refused.

    `runtime` is empty for the first that is installed, `threads` 0 for one per core. Names of files
    in the model mean nothing to the runtime, which finds no other file where it looks.
    """
    try:
        _check("model", memoryview(model))
    except (LookupError, ValueError, RecursionError) as error:
        why = str(error) if isinstance(error, ValueError) else "damaged parts"
        raise InputError(f"the ONNX model is refused, as it has {why}: export it again") from None
    names = [runtime] if runtime else list(_LOADERS)
    name = next((one for one in names if find_spec(one)), "")
    if not name:
        command = f"pip install {names[0]}"
        raise InputError(f"this needs {' or '.join(names)}, and none is installed: {command}")
    try:
        return _LOADERS[name](model, threads or machine.threads())
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()] or [repr(error)]
        raise InputError(
            f"{name} cannot load the model: {lines[-1].strip()[:250]}; try another runtime"
        ) from error


def _onnxruntime(model: bytes, threads: int) -> Loaded:
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
    (entry,), (output,) = session.get_inputs(), session.get_outputs()

    def logits(images: NDArray[np.uint8]) -> NDArray[np.float32]:
        result: NDArray[np.float32] = session.run([output.name], {entry.name: images})[0]
        return result

    return Loaded(
        f"onnxruntime {onnxruntime.__version__}",
        (entry.name, _fixed(entry.shape)),
        (output.name, _fixed(output.shape)),
        logits,
    )


def _openvino(model: bytes, threads: int) -> Loaded:
    import openvino

    core = openvino.Core()
    # Its default on CPUs with bf16 is bf16, which differs by a percent.
    settings: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "f32"}
    if threads:
        settings["INFERENCE_NUM_THREADS"] = threads
    # Files that a model names are searched in its folder, for bytes in the current one.
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "model.onnx")
        file.write_bytes(model)
        compiled = core.compile_model(core.read_model(file), "CPU", settings)
    entry, output = compiled.input(0), compiled.output(0)

    def logits(images: NDArray[np.uint8]) -> NDArray[np.float32]:
        result: NDArray[np.float32] = compiled([images])[output]
        return result.copy()  # the next call overwrites it

    shapes = [[d.get_length() if d.is_static else -1 for d in port.partial_shape]
              for port in (entry, output)]  # fmt: skip
    return Loaded(
        f"openvino {openvino.__version__.split('-')[0]}",
        (entry.get_any_name(), tuple(shapes[0])),
        (output.get_any_name(), tuple(shapes[1])),
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


def _check(kind: str, message: memoryview) -> None:
    """Raise unless a message has allowed fields in their only spelling, as runtimes read others."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        field, wire_type = tag >> 3, tag & 7
        inner = _FIELDS[kind].get(field)
        if inner is None:
            raise ValueError(f"field {field} of a {kind}, such as weights in other files")
        if wire_type == 0:
            size, at = 0, _varint(message, at)[1]
        else:
            size, at = _varint(message, at) if wire_type == 2 else ({1: 8, 5: 4}[wire_type], at)
        if inner:
            if wire_type != 2:
                raise ValueError(f"field {field} of a {kind} in another wire type")
            _check(inner, message[at : at + size])
        at += size
    if at != len(message):
        raise ValueError("a part without an end")


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """Return an integer and the position after it."""
    value = shift = 0
    while message[at] & 0x80:
        value |= (message[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
    if shift > 63 or (shift and not message[at]):
        raise ValueError("an integer in another spelling")
    return value | message[at] << shift, at + 1


_LOADERS = {ONNXRUNTIME: _onnxruntime, OPENVINO: _openvino}
