"""A network of one's own as the configuration names it: `mine.py:build`, and the file's text."""

import hashlib
import re
import shlex
import symtable
from pathlib import Path
from typing import Any

from kfp_ddp.core import packed
from kfp_ddp.core.errors import InputError

LARGEST = 64 << 10
"""Bytes of a file; packed it has to fit into a word of a command line."""
_NAME = re.compile(r"(?:.*[/\\])?(?P<file>[^/\\:]+\.py):(?P<function>[A-Za-z_]\w*)")


def is_file(model: str) -> bool:
    """Whether `model` names a file, not a network that is known by name."""
    return model.endswith(".py") or ".py:" in model


def split(model: str) -> tuple[str, str]:
    """File and function of `mine.py:build`; raises ValueError for another form."""
    found = _NAME.fullmatch(model)
    if not found:
        raise ValueError(
            f"model={model!r} names no function of a file: write mine.py:build, where "
            "build(num_classes) returns the network"
        )
    return found["file"], found["function"]


def checked(model: str, code: str) -> str:
    """The model without the folder of its file, whose text is looked at but not run.

    Raises:
        ValueError: the text is missing, no Python, or does not define the function; one line.
    """
    file, function = split(model)
    if not code:
        raise ValueError(
            f"model={model!r} is a file, whose text travels in model_code: set it to "
            f"kfp_ddp.training.model_file.pack({file!r})"
        )
    top = _table(unpack(code), file)
    names = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_local()}
    if function not in names:
        raise ValueError(
            f"{file} defines no {function}: it needs a function {function}(num_classes) that "
            "returns the network"
        )
    return f"{file}:{function}"


def check_script(script: str, arguments: str) -> None:
    """Look at the file of a training script without running it.

    Raises:
        ValueError: it is not packed, no Python, or its arguments are no words; one line.
    """
    _table(unpack(script, "script"), "script")
    try:
        shlex.split(arguments)
    except ValueError as error:
        raise ValueError(f"script_args={arguments!r} are no words: {error}") from None


def _table(text: str, file: str) -> symtable.SymbolTable:
    try:
        return symtable.symtable(text, file, "exec")
    except SyntaxError as error:
        raise ValueError(f"{file}, line {error.lineno}: {error.msg}: correct the file") from None


def pack(path: str | Path, what: str = "model") -> str:
    """The text of a file for `model_code` or `script`.

    Raises:
        InputError: it cannot be read, or is too long.
    """
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
    """The text in `model_code` or `script`; raises ValueError in one line."""
    try:
        return packed.unpack(code)
    except ValueError as error:
        raise ValueError(
            f"{name}={code[:40]!r}... is no packed Python file in UTF-8 ({error}); make it "
            "with kfp_ddp.training.model_file.pack"
        ) from None


def digest(code: str) -> str:
    """The sha256 of the file's text; '' for none."""
    return hashlib.sha256(unpack(code).encode()).hexdigest() if code else ""


def with_code(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of a TrainConfig with the texts of the files that it names on this machine.

    Raises:
        InputError: one cannot be read.
    """
    found = dict(fields)
    if str(found.get("script", "")).endswith(".py"):
        found["script"] = pack(found["script"], "script")
    model = str(found.get("model", ""))
    if is_file(model) and not found.get("model_code"):
        file = Path(model.rpartition(":")[0] or model)
        if file.exists() or not found.get("script"):
            found["model_code"] = pack(file)
    return found
