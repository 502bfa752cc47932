"""Files that torch.save wrote, read without the code in them."""

import pickle
import re
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.text import one_line

_DAMAGE = (
    *(RuntimeError, ValueError, EOFError, LookupError, TypeError, AttributeError),
    *(zipfile.BadZipFile, NotImplementedError),
)


def load(path: Path) -> Any:
    """Return what torch.save wrote to a file, on the CPU; code in it is not run.

    Raise InputError for other content, and for an archive that expands; OSError.
    """
    try:
        _check_sizes(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about formats that it may fail to read
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        name = re.search(r"(?:GLOBAL|class) ([\w.]+)", str(error))
        what = f" ({name[1]})" if name else ""
        raise InputError(
            f"{path} contains more than weights{what}, and code in it is not run: save only its "
            "state_dict, with torch.save or as .safetensors"
        ) from None
    except _DAMAGE as error:
        raise no_weights(path, error) from None


def _check_sizes(path: Path) -> None:
    """Raise ValueError for an archive that expands: torch only writes stored members."""
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    stored = all(member.compress_type == zipfile.ZIP_STORED for member in members)
    if not stored or sum(member.file_size for member in members) > path.stat().st_size:
        raise ValueError("it is a compressed archive")


def no_weights(path: Path, error: object) -> InputError:
    """Return the error for a file without weights."""
    return InputError(
        f"{path} contains no readable weights ({one_line(error)}): use a state_dict saved by "
        "torch.save or as .safetensors"
    )
