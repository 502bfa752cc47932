"""A Python file, a word or an archive as one line that no shell or YAML changes: a data URL."""

import base64
import hashlib
import re
from pathlib import Path
from typing import Any

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.text import human

PYTHON, WORD, ARCHIVE = (
    f"data:{kind};base64," for kind in ("text/x-python", "text/plain", "application/gzip")
)
_KINDS = {
    PYTHON: ("Python file", "kfp_ddp.training.spec.model_file.pack"),
    WORD: ("word", "kfp_ddp.jobs.shipping.authoring.as_script"),
    ARCHIVE: ("archive", "kfp_ddp.jobs.shipping.authoring.as_folder"),
}
"""What the content is called, and the function for users that packs it."""
_ITEM = re.compile(rf"(?m)^( *)(?:- )?(\w+): ['\"]?(?:{'|'.join(_KINDS)})([\w+/=]*)['\"]?$")
"""A line of YAML with a packed file."""
_FILE = re.compile(r"(?m)^ *model: (\S+\.py):")
"""The file of the network, in YAML."""
MOST_BYTES = 120_000
"""Bytes of a value in a pipeline: KFP hands a step all its inputs as one argument of 128 KiB."""


def pack(content: bytes, kind: str = PYTHON) -> str:
    """Return the content as one line."""
    return kind + base64.b64encode(content).decode()


def pack_file(path: str | Path, largest: int = MOST_BYTES) -> str:
    """Pack a Python file; InputError if it cannot be read, or as `pack_text`."""
    try:
        return pack_text(Path(path).read_bytes().decode(), str(path), largest)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be packed: {error}; give a Python file in UTF-8") from None


def pack_text(text: str, what: str, largest: int = MOST_BYTES) -> str:
    """Pack the text of a Python file; InputError, with `what`, if it is invalid or too large."""
    if "\0" in text:
        raise InputError(f"{what} contains a NUL, invalid in a Python file: remove it")
    return fitting(pack(text.encode()), what, largest)


def fitting(line: str, what: str, largest: int = MOST_BYTES) -> str:
    """Return a packed line; InputError if it has more than `largest` bytes."""
    if len(line) > largest:
        # A training takes no folder.
        folder = ", or use as_folder(..., upload=...) with a bucket or a PVC"
        raise InputError(
            f"{what} is packed into {len(line):,} bytes, and at most {largest:,} fit into a "
            f"pipeline: put what it uses into the image{folder if largest == MOST_BYTES else ''}"
        )
    return line


def unpack(line: str, name: str, kind: str = PYTHON) -> bytes:
    """Return the content of a line, the setting `name`; InputError if it is cut or of no `kind`."""
    try:
        if not line.startswith(kind):
            raise ValueError(f"it does not begin with {kind}")
        content = base64.b64decode(line.removeprefix(kind), validate=True)
        if kind != ARCHIVE:
            content.decode()
    except ValueError as error:
        what, packer = _KINDS[kind]
        raise InputError(
            f"{name}={line[:40]!r}... is not a packed {what} ({error}); make it with {packer}"
        ) from None
    return content


def describe(value: Any) -> Any:
    """Return a packed file as a text with size and digest, another value unchanged."""
    if not isinstance(value, str) or not value.startswith(PYTHON):
        return value
    content = base64.b64decode(value.removeprefix(PYTHON))
    return f"a file of {len(content):,} bytes, sha256 {hashlib.sha256(content).hexdigest()[:12]}"


def in_short(text: str) -> str:
    """Return YAML for people: each packed file is a comment with its name, size and digest."""
    names = {"model_code": next(iter(_FILE.findall(text)), "a file")}

    def comment(item: re.Match[str]) -> str:
        content = base64.b64decode(item[3])
        digest = hashlib.sha256(content).hexdigest()[:12]
        name = names.get(item[2], "a file")
        return f"{item[1]}# {item[2]}: {name}, {human(len(content))}, sha256 {digest}"

    return _ITEM.sub(comment, text)
