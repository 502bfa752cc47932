"""A user's own network as the configuration names it: `mine.py:build` and the file's text."""

import hashlib
import re
import shlex
import symtable
from pathlib import Path
from typing import Any

from kfp_ddp.core import packed
from kfp_ddp.core.errors import InputError

LARGEST = 64 << 10
"""Bytes of a file; packed, it has to fit into one argument of a command line."""
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
            f"kfp_ddp.training.model_file.pack({file!r})"
        )
    top = _table(unpack(code), file)
    names = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_local()}
    if function not in names:
        raise ValueError(
            f"{file} does not define {function}: add a function {function}(num_classes) that "
            "returns the network"
        )
    return f"{file}:{function}"


def check_script(script: str, arguments: str) -> None:
    """Raise ValueError if a script is not packed Python, or its arguments have an open quote."""
    _table(unpack(script, "script"), "script")
    try:
        shlex.split(arguments)
    except ValueError as error:
        raise ValueError(f"script_args={arguments!r} cannot be split: {error}") from None


def _table(text: str, file: str) -> symtable.SymbolTable:
    try:
        return symtable.symtable(text, file, "exec")
    except SyntaxError as error:
        raise ValueError(f"{file}, line {error.lineno}: {error.msg}: correct the file") from None


def pack(path: str | Path, what: str = "model") -> str:
    """Pack the text of a file for `model_code` or `script`; raise InputError."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"cannot read the {what} {path}: {error.strerror}; correct it") from None
    if len(content) > LARGEST:
        raise InputError(
            f"the {what} {path} has {len(content):,} bytes, {LARGEST:,} are allowed: put what it "
            "uses into a package of the image and import it"
        )
    return packed.pack(content)


def unpack(code: str, name: str = "model_code") -> str:
    """Return the text in `model_code` or `script`; raise ValueError if it is not packed."""
    try:
        return packed.unpack(code)
    except ValueError as error:
        raise ValueError(
            f"{name}={code[:40]!r}... is not a packed Python file in UTF-8 ({error}); create "
            "it with kfp_ddp.training.model_file.pack"
        ) from None


def digest(code: str) -> str:
    """Return the sha256 of the packed text; '' for no text."""
    return hashlib.sha256(unpack(code).encode()).hexdigest() if code else ""


def with_code(fields: dict[str, Any]) -> dict[str, Any]:
    """Add the texts of the local files that the fields of a TrainConfig name; raise InputError."""
    result = dict(fields)
    if str(result.get("script", "")).endswith(".py"):
        result["script"] = pack(result["script"], "script")
    model = str(result.get("model", ""))
    if is_file(model) and not result.get("model_code"):
        file = Path(model.rpartition(":")[0] or model)
        if file.exists() or not result.get("script"):
            result["model_code"] = pack(file)
    return result
