"""Files of safetensors, opened after a look at the size of their description."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LARGEST_HEADER = 16 << 20
"""Limit in bytes of names, shapes and metadata; 20,000 classes of 40 letters have 1 MB."""


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Yield a file of safetensors; raise OSError, SafetensorError, or ValueError if it is large."""
    from safetensors import safe_open

    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if length > LARGEST_HEADER:
        raise ValueError(f"its header has {length:,} bytes, more than {LARGEST_HEADER:,}")
    with safe_open(path, framework="pt") as content:
        yield content
