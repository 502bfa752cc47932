"""ONNX models in ONNX Runtime or OpenVINO, on the CPU."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
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
    """Load a model from the content of an ONNX file.

    `runtime` is `ONNXRUNTIME` or `OPENVINO`, empty for the first that is installed; `threads` are
    those of one call, 0 for one per core. Raise InputError if it is not installed or refuses the
    model, or the model has weights in other files: runtimes would read the current folder.
    """
    try:
        external = _is_external("model", memoryview(model))
    except (LookupError, ValueError, RecursionError):
        raise InputError("the ONNX model is damaged: export it again") from None
    if external:
        raise InputError("the ONNX model has weights in other files: save it with all its weights")
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
    read = core.read_model(model=model)
    # Its default on CPUs with bf16 is bf16, which differs by a percent.
    settings: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "f32"}
    if threads:
        settings["INFERENCE_NUM_THREADS"] = threads
    compiled = core.compile_model(read, "CPU", settings)
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


_PARTS: dict[str, dict[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {},
}
"""Fields of the messages of onnx.proto that contain a tensor, by number."""
_EXTERNAL_DATA, _DATA_LOCATION = 13, 14


def _is_external(kind: str, message: memoryview) -> bool:
    """Return whether a protobuf message has a tensor in another file; LookupError if it is none."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        field, wire_type = tag >> 3, tag & 7
        if kind == "tensor" and field in (_EXTERNAL_DATA, _DATA_LOCATION):
            return True  # exporters leave out the default location
        if wire_type == 0:
            _, at = _varint(message, at)
            continue
        sizes = {1: 8, 5: 4}
        size, at = _varint(message, at) if wire_type == 2 else (sizes[wire_type], at)
        part = message[at : at + size]
        at += size
        inner = _PARTS[kind].get(field) if wire_type == 2 else None
        if inner is not None and _is_external(inner, part):
            return True
    return False


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """Return an integer and the position after it."""
    value = shift = 0
    while message[at] & 0x80:
        value |= (message[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
    return value | message[at] << shift, at + 1


_LOADERS = {ONNXRUNTIME: _onnxruntime, OPENVINO: _openvino}
