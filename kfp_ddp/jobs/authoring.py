"""A function, a file or a folder as inputs of `job`, such as `job(**as_function(train), ...)`.

All of it arrives to the byte: it is packed, so that neither KFP, Kubernetes nor YAML changes it,
and no shell reads it.
"""

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kfp_ddp.jobs.specification import code as folder_of
from kfp_ddp.jobs.specification.function import source_of
from kfp_ddp.jobs.specification.packages import locked
from kfp_ddp.jobs.specification.script import carried, packed, packed_text, words

__all__ = ["as_folder", "as_function", "as_script", "locked"]


def as_function(
    func: Callable[..., Any],
    func_args: Mapping[str, Any] | None = None,
    later: Iterable[str] = (),
) -> dict[str, Any]:
    """Inputs of `job` by which every worker calls the function.

    Args:
        func: A plain function that imports what it uses inside itself.
        func_args: Its arguments by name: texts, numbers, booleans, None, lists and dicts.
        later: Names of arguments that come when the pipeline runs, as words name=value in `args`.

    Raises:
        InputError: a function or arguments that cannot travel.
    """
    text = source_of(func, func_args or {}, later)
    return {"script": packed_text(text, f"function {func.__name__}")}


def as_script(path: str | Path, args: Sequence[str] = ()) -> dict[str, Any]:
    """Inputs of `job` by which every worker runs a Python file with arguments.

    Raises:
        InputError: it cannot be read, is not in UTF-8, or is too large for a pipeline.
    """
    return {"script": packed(path), "args": words(args)}


def as_folder(
    path: str | Path, entry: str, args: Sequence[str] = (), upload: str = ""
) -> dict[str, Any]:
    """Inputs of `job` by which every worker runs a file or a module in a folder of code.

    Args:
        path: The folder; hidden files and `__pycache__` stay out.
        entry: What runs: a file such as train.py, or a module such as package.train.
        args: Its arguments.
        upload: Where the packed folder is put, by its digest: gs://bucket/prefix, another bucket's
            address, or a folder on a claim that the workers mount under this very path; '' to let
            the pipeline itself carry it.

    Raises:
        InputError: a folder that cannot be packed, has no such entry or is too large to be carried.
        StorageError: a place that cannot be written.
    """
    archive = folder_of.archive_of(path)
    folder_of.check(archive, entry)
    if upload:
        code = _uploaded(archive, upload)
    else:
        code = carried(folder_of.as_data_url(archive), f"folder {path}")
    return {"code": code, "entry": entry, "args": words(args)}


def _uploaded(archive: bytes, upload: str) -> str:
    from kfp_ddp.storage.destination import open_destination

    name = folder_of.digest_of(archive) + folder_of.SUFFIX
    place = open_destination(upload)
    place.prepare()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, name)
        file.write_bytes(archive)
        place.put(file, name)
    return f"{upload.rstrip('/')}/{name}"
