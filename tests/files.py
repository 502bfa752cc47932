"""Files of tests."""

from pathlib import Path


def write(path: Path, content: str | bytes = b"") -> Path:
    """Write a file in a folder that may not exist yet, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path
