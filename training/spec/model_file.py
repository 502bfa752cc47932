"""A user's own network as the configuration names it: `mine.py:build` and the file's text."""

import hashlib
import re
import shlex
import symtable
from pathlib import Path
from typing import Any

from kfp_ddp.core import packed

LARGEST = len(packed.pack(bytes(64 << 10)))
"""Bytes of a packed file, of 64 KiB: many steps and processes get it in an argument."""
_NAME = re.compile(r"(?:.*[/\\])?(?P<file>[^/\\:]+\.py):(?P<function>[A-Za-z_]\w*)")


def is_file(model: str) -> bool:
    """Return whether `model` names a file, not a network that is known by name."""
    return model.endswith(".py") or ".py:" in model


def split(model: str) -> tuple[str, str]:
    """Split `mine.py:build` into file and function; raise ValueError for another form."""
    match = _NAME.fullmatch(model)
    if not match:
        raise ValueError(
            f"model={model!r} does not name a function of a file: write mine.py:build, where "
            "build(num_classes) returns the network"
        )
    return match["file"], match["function"]


def checked(model: str, code: str) -> str:
    """Return the model without the folder of its file, if the text defines it; raise ValueError."""
    file, function = split(model)
    if not code:
        raise ValueError(
            f"model={model!r} is a file, its text has to be in model_code: set it to "
            f"kfp_ddp.training.spec.model_file.pack({file!r})"
        )
    top = _table(packed.unpack(code, "model_code").decode(), file)
    names = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_local()}
    if function not in names:
        raise ValueError(
            f"{file} does not define {function}: add a function {function}(num_classes) that "
            "returns the network"
        )
    return f"{file}:{function}"


def check_script(script: str, arguments: str) -> None:
    """Raise ValueError if a script is not packed Python, or its arguments have an open quote."""
    _table(packed.unpack(script, "script").decode(), "script")
    try:
        shlex.split(arguments)
    except ValueError as error:
        raise ValueError(f"script_args={arguments!r} cannot be split: {error}") from None


def _table(text: str, file: str) -> symtable.SymbolTable:
    try:
        return symtable.symtable(text, file, "exec")
    except SyntaxError as error:
        raise ValueError(f"{file}, line {error.lineno}: {error.msg}: correct the file") from None


def pack(path: str | Path) -> str:
    """Pack the text of a file for `model_code` or `script`; raise InputError."""
    return packed.pack_file(path, LARGEST)


def digest(code: str) -> str:
    """Return the sha256 of the packed text; '' for no text."""
    return hashlib.sha256(packed.unpack(code, "model_code")).hexdigest() if code else ""


def with_code(fields: dict[str, Any]) -> dict[str, Any]:
    """Add the texts of the local files that the fields of a TrainConfig name; raise InputError."""
    result = dict(fields)
    if str(result.get("script", "")).endswith(".py"):
        result["script"] = pack(result["script"])
    model = str(result.get("model", ""))
    if is_file(model) and not result.get("model_code"):
        file = Path(model.rpartition(":")[0] or model)
        if file.exists() or not result.get("script"):
            result["model_code"] = pack(file)
    return result
