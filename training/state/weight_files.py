"""Files of weights, by torch.save or in safetensors, read without the code in them."""

import contextlib
import os
import pickle
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import ZIP_STORED, BadZipFile, ZipFile, is_zipfile

import torch
from torch.serialization import safe_globals

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.text import one_line

LARGEST_HEADER = 16 << 20
"""Limit in bytes of names, shapes and metadata; 20,000 classes of 40 letters have 1 MB."""
_DAMAGE = (RuntimeError, ValueError, EOFError, LookupError, TypeError, AttributeError, BadZipFile)


class _Ignored:
    """Stand-in for a value beside the weights; neither its class nor its content is used."""

    def __init__(self, *_arguments: object) -> None: ...

    def __setstate__(self, _state: object) -> None: ...


_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
_IGNORED = (
    "argparse.Namespace",
    "types.SimpleNamespace",
    *(f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in _PATHS),
    "datetime.date",
    "datetime.time",
    "datetime.datetime",
    "datetime.timedelta",
    "datetime.timezone",
    "numpy.core.multiarray.scalar",
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray.scalar",
    "numpy._core.multiarray._reconstruct",
    "numpy.dtype",
    "numpy.ndarray",
    "builtins.bool",
    "builtins.int",
    "builtins.float",
    "builtins.str",
    "builtins.list",
    "builtins.dict",
    "builtins.tuple",
)
"""Classes of plain values that trainers save beside the weights."""
_ENDS = 1 << 16
"""Bytes of the first and of the last part of a file that show what it is."""
_FORMS = (
    (rb"\A(\x93NUMPY|PK\x03\x04.{26}[^\0]*\.npy)|\.np[yz]\Z", "arrays of NumPy"),
    (rb"\A(\x89HDF|PK\x03\x04.{26}(metadata|config)\.json)|\.(h5|hdf5|keras)\Z", "a file of Keras"),
    (rb"\A.{4}TFL3|\.tflite\Z", "a model of TensorFlow Lite"),
    (rb"\.(pb|ckpt\.index|data-\d+-of-\d+)\Z", "a part of a model of TensorFlow"),
    (rb"\.onnx\Z", "a model of ONNX"),
    (rb"\AGGUF|\.gguf\Z", "a model of llama.cpp"),
    (rb"\.(msgpack|flax)\Z", "weights of Flax"),
    (rb"/constants\.pkl", "a program of TorchScript"),
    (rb"\.(pkl|pickle|joblib)\Z", "a pickle of another program"),
    (rb"\Aversion https://git-lfs", "a pointer of git-lfs, whose file was not downloaded"),
    (rb"\A\s*<(!doctype|html)", "a page of a web server"),
)
"""What else is taken for weights, by first or last bytes or by the end of its name."""
_ALLOWED: list[Any] = [
    *((_Ignored, name) for name in _IGNORED),
    *((lambda *_: {}, "collections.defaultdict"), (lambda *_: [], "collections.deque")),
]


def load(path: Path, foreign: bool = False) -> Any:
    """Return what torch.save wrote, without its code; raise InputError, OSError.

    In a `foreign` file arguments, paths, numbers of NumPy and the like become stand-ins.
    """
    try:
        _check_sizes(path)
        allowed = safe_globals(_ALLOWED if foreign else [])
        with warnings.catch_warnings(), allowed, path.open("rb") as file:  # not by its suffix
            warnings.simplefilter("ignore", UserWarning)  # about formats that it may fail to read
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        name = re.search(r"(?:GLOBAL|class) ([\w.]+)", str(error))
        if not name:
            raise no_weights(path, "it is no file of torch.save or safetensors") from None
        raise InputError(
            f"{path} contains more than weights ({name[1]}), and code in it is not run: save "
            "only its state_dict, with torch.save or as .safetensors"
        ) from None
    except InputError:
        raise
    except _DAMAGE:
        raise no_weights(path, "it is damaged or cut off, or another program wrote it") from None


def _check_sizes(path: Path) -> None:
    """Raise InputError for an archive that expands: torch only writes stored members."""
    if not is_zipfile(path):
        return
    with ZipFile(path) as archive:
        members = archive.infolist()
    is_stored = all(member.compress_type == ZIP_STORED for member in members)
    size = sum(member.file_size for member in members)
    # Members may overlap, so that a small archive expands although nothing is compressed.
    if not is_stored or size > path.stat().st_size:
        raise no_weights(path, "it is a compressed archive")


def no_weights(path: Path, error: object) -> InputError:
    """Return the error for a file without weights, with what it is if that is known."""
    ends = b""
    with contextlib.suppress(OSError), path.open("rb") as file:
        ends = file.read(_ENDS)
        file.seek(max(0, os.fstat(file.fileno()).st_size - _ENDS))
        ends += file.read()
    for pattern, form in _FORMS:
        if re.search(pattern, ends + os.fsencode(path.name), re.DOTALL | re.IGNORECASE):
            error = f"it is {form}"
    return InputError(
        f"{path} contains no readable weights ({one_line(error)}): use a state_dict saved by "
        "torch.save or as .safetensors"
    )


@contextlib.contextmanager
def open_safetensors(path: Path) -> Iterator[Any]:
    """Yield a file of safetensors; raise OSError, SafetensorError, or ValueError if it is large."""
    from safetensors import safe_open

    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if length > LARGEST_HEADER:
        raise ValueError(f"its header has {length:,} bytes, more than {LARGEST_HEADER:,}")
    with safe_open(path, framework="pt") as content:
        yield content
