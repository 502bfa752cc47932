"""Files that torch.save wrote, read without the code in them."""

import pickle
import re
import warnings
from pathlib import Path
from typing import Any
from zipfile import ZIP_STORED, BadZipFile, ZipFile, is_zipfile

import torch
from torch.serialization import safe_globals

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.text import one_line

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
    except _DAMAGE as error:
        raise no_weights(path, error) from None


def _check_sizes(path: Path) -> None:
    """Raise ValueError for an archive that expands: torch only writes stored members."""
    if not is_zipfile(path):
        return
    with ZipFile(path) as archive:
        members = archive.infolist()
    is_stored = all(member.compress_type == ZIP_STORED for member in members)
    size = sum(member.file_size for member in members)
    # Members may overlap, so that a small archive expands although nothing is compressed.
    if not is_stored or size > path.stat().st_size:
        raise ValueError("it is a compressed archive")


def no_weights(path: Path, error: object) -> InputError:
    """Return the error for a file without weights."""
    return InputError(
        f"{path} contains no readable weights ({one_line(error)}): use a state_dict saved by "
        "torch.save or as .safetensors"
    )
