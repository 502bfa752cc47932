"""A Python file as one line: a data URL (RFC 2397), which needs no quoting in a shell."""

import base64
import hashlib
from typing import Any

PREFIX = "data:text/x-python;base64,"


def pack(content: bytes) -> str:
    """Return the content of a file as one line."""
    return PREFIX + base64.b64encode(content).decode()


def unpack(line: str) -> str:
    """Return the text of the file; raises ValueError if `pack` did not create the line."""
    if not line.startswith(PREFIX):
        raise ValueError(f"it does not begin with {PREFIX}")
    return base64.b64decode(line.removeprefix(PREFIX), validate=True).decode()


def describe(value: Any) -> Any:
    """Return a packed file as a text with size and digest, another value unchanged."""
    if not isinstance(value, str) or not value.startswith(PREFIX):
        return value
    content = base64.b64decode(value.removeprefix(PREFIX))
    return f"a file of {len(content):,} bytes, sha256 {hashlib.sha256(content).hexdigest()[:12]}"
