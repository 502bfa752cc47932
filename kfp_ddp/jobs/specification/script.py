"""A user's Python file and its arguments as values of a pipeline that arrive to the byte.

Text on its way to a step is an argument of a container, where Kubernetes makes one `$` of two and
expands `$(NAME)` (kubeflow/pipelines#10370), and KFP compiles no default with a line break. So a
file can travel packed, as a data URL (RFC 2397).
"""

import base64
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kfp_ddp.core import packed as packing
from kfp_ddp.core.errors import InputError
from kfp_ddp.core.packed import PREFIX

__all__ = ["PREFIX", "packed", "unexpanded", "unpacked"]

WORD = "data:text/plain;base64,"
# What KFP, Kubernetes and YAML leave as it is.
PLAIN = re.compile(r"[\w ./:,;=@%+-]*", re.ASCII)
MOST_BYTES = 120_000
"""Bytes of a value in a pipeline: KFP hands a step all its inputs as one argument of 128 KiB."""


def packed(path: str | Path) -> str:
    """The file as one line of plain characters, for the input `script` of a component.

    Raises:
        InputError: it cannot be read, is not in UTF-8, or is too large for a pipeline.
    """
    try:
        return packed_text(Path(path).read_bytes().decode(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be packed: {error}; give a Python file in UTF-8") from None


def packed_text(text: str, what: str) -> str:
    """The text of a Python file as `packed` makes it; `what` names it in an error."""
    if "\0" in text:
        raise InputError(f"{what} holds a NUL, which no Python file may: remove it")
    return carried(packing.pack(text.encode()), what)


def carried(value: str, what: str) -> str:
    """A value of a pipeline, if it is not too large for one.

    Raises:
        InputError: it is.
    """
    if len(value) > MOST_BYTES:
        raise InputError(
            f"{what} is packed into {len(value):,} bytes, and a pipeline carries {MOST_BYTES:,}: "
            "as_folder(..., upload=...) brings more by a bucket or a claim"
        )
    return value


def words(arguments: Iterable[str]) -> list[str]:
    """Arguments for the input `args`, packed where something on the way would change them."""
    return [
        word if PLAIN.fullmatch(word) and not word.startswith(WORD) else _packed_word(word)
        for word in arguments
    ]


def _packed_word(word: str) -> str:
    return WORD + base64.b64encode(word.encode()).decode()


def unpacked_words(arguments: Iterable[Any]) -> list[Any]:
    """The arguments that `words` was given; what it cannot have made stays as it is.

    Raises:
        InputError: one that was cut.
    """
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
    """Text that Kubernetes leaves as it was, in an argument or a variable of a container.

    It expands $(NAME) there, and makes $$ one $.
    """
    return text.replace("$", "$$")


def unpacked(script: str) -> str:
    """The text of a file that `packed` made; any other text as it is.

    Raises:
        InputError: for a data URL of another kind, or one that was cut.
    """
    if not script.startswith("data:"):
        return script
    try:
        return packing.unpack(script)
    except ValueError as error:
        raise InputError(
            f"script={script[:40]!r}... is not a packed Python file in UTF-8 ({error}); "
            "make it with kfp_ddp.jobs.specification.script.packed"
        ) from None
