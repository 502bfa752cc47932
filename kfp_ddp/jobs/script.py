"""Python files, their arguments and pinned packages as pipeline parameters."""

import base64
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kfp_ddp.core import packed as packing
from kfp_ddp.core.errors import InputError

WORD = "data:text/plain;base64,"
# Characters that KFP, Kubernetes and YAML do not change.
PLAIN = re.compile(r"[\w ./:,;=@%+-]*", re.ASCII)
MOST_BYTES = 120_000
"""Bytes of a value in a pipeline: KFP hands a step all its inputs as one argument of 128 KiB."""


def packed(path: str | Path) -> str:
    """Return a file as one line of plain characters, for the input `script` of a component.

    InputError if it cannot be read, is not in UTF-8, or is too large for a pipeline.
    """
    try:
        return packed_text(Path(path).read_bytes().decode(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be packed: {error}; give a Python file in UTF-8") from None


def packed_text(text: str, what: str) -> str:
    """Return the text of a Python file as `packed` does; `what` names it in errors."""
    if "\0" in text:
        raise InputError(f"{what} contains a NUL, invalid in a Python file: remove it")
    return carried(packing.pack(text.encode()), what)


def carried(value: str, what: str) -> str:
    """Return a value of a pipeline; InputError if it is too large for one."""
    if len(value) > MOST_BYTES:
        raise InputError(
            f"{what} is packed into {len(value):,} bytes, and a pipeline at most {MOST_BYTES:,}: "
            "use as_folder(..., upload=...) with a bucket or a PVC"
        )
    return value


def words(arguments: Iterable[str]) -> list[str]:
    """Return arguments for the input `args`, packed if a system on the way would change them."""
    return [
        word
        if PLAIN.fullmatch(word) and not word.startswith(WORD)
        else WORD + base64.b64encode(word.encode()).decode()
        for word in arguments
    ]


def unpacked_words(arguments: Iterable[Any]) -> list[Any]:
    """Return arguments with those unpacked that `words` packed; InputError for one that was cut."""
    return [_unpacked(w) if isinstance(w, str) and w.startswith(WORD) else w for w in arguments]


def _unpacked(line: str) -> str:
    try:
        return base64.b64decode(line.removeprefix(WORD), validate=True).decode()
    except ValueError as error:
        raise InputError(
            f"args: {line[:40]!r}... is not a packed word in UTF-8 ({error}); "
            "make it with kfp_ddp.jobs.authoring.as_script"
        ) from None


def unexpanded(text: str) -> str:
    """Return text escaped for a container, where Kubernetes expands $(NAME) and $$ is one $."""
    return text.replace("$", "$$")


def unpacked(script: str) -> str:
    """Return the text of a file that `packed` packed; any other text unchanged.

    InputError for a data URL of another kind, or one that was cut.
    """
    if not script.startswith("data:"):
        return script
    try:
        return packing.unpack(script)
    except ValueError as error:
        raise InputError(
            f"script={script[:40]!r}... is not a packed Python file in UTF-8 ({error}); "
            "make it with kfp_ddp.jobs.script.packed"
        ) from None


_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
_MARKER = r"""(?:\s*;(?:[\w\s.,<>=!~()'"|*+/]|-[\w.])+?)?"""
PACKAGE = (
    rf"^{_NAME}(?:\[[\w\s,.-]+\])?==[A-Za-z0-9][A-Za-z0-9.!+_-]*{_MARKER}"
    r"(?:\s+--hash=sha256:[0-9a-f]{64})*$"
)
INDEX = r"^(https?|file)://\S+$"
HASH = "--hash="


def locked(path: str | Path) -> list[str]:
    """Return the pins, with hashes, of a requirements file as uv or pip-tools write it.

    InputError for no file, a line that is no pin, or more than a pipeline carries.
    """
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as a requirements file: {error}") from None
    joined = re.sub(r"\\\r?\n", " ", text)
    lines = [" ".join(re.sub(r"(^|\s)#.*", "", line).split()) for line in joined.splitlines()]
    pins = [line for line in lines if line]
    for line in pins:
        if not re.fullmatch(PACKAGE, line):
            raise InputError(
                f"{path}: {line[:80]!r} is not a pin such as name==1.0: write one per line"
            )
    check_packages(pins)
    size = sum(map(len, pins))
    if size > MOST_BYTES:
        raise InputError(
            f"{path} pins {size:,} bytes, and a pipeline carries {MOST_BYTES:,}: "
            "lock what the image lacks alone, or build an image with all of it"
        )
    return pins


def check_packages(packages: Sequence[str]) -> None:
    """Raise InputError if only some pins have hashes, which pip would not check."""
    without = [line for line in packages if HASH not in line]
    if without and len(without) < len(packages):
        raise InputError(
            f"packages_to_install: {without[0]!r} has no hash and others have: lock all or none"
        )
