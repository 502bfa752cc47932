"""A Python file as one line of plain characters: a data URL (RFC 2397), which no shell touches."""

import base64
import hashlib
from typing import Any

PREFIX = "data:text/x-python;base64,"


def pack(content: bytes) -> str:
    """The line of a file's content."""
    return PREFIX + base64.b64encode(content).decode()


def unpack(line: str) -> str:
    """The text of the file; raises ValueError for what `pack` did not make."""
    if not line.startswith(PREFIX):
        raise ValueError(f"it does not begin with {PREFIX}")
    return base64.b64decode(line.removeprefix(PREFIX), validate=True).decode()


def in_words(value: Any) -> Any:
    """A setting as people read it: a file by size and digest; anything else as it is."""
    if not isinstance(value, str) or not value.startswith(PREFIX):
        return value
    content = base64.b64decode(value.removeprefix(PREFIX))
    return f"a file of {len(content):,} bytes, sha256 {hashlib.sha256(content).hexdigest()[:12]}"
