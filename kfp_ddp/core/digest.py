"""SHA-256 digests, in hex."""

import hashlib
import json
from pathlib import Path
from typing import Any


def sha256(file: Path) -> str:
    """Return the digest of a file's content; raises OSError."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def sha256_of_json(value: Any) -> str:
    """Return the digest of a JSON value, whatever the order of names in its objects."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
