"""The manifest of a checkpoint, read without torch."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
STATE = "state.pt"


@dataclass(frozen=True)
class Manifest:
    """What it says: `digest` is the sha256 of state.pt, `fields` is all of it."""

    step: int
    digest: str
    fields: dict[str, Any]


def read_manifest(checkpoint: Path) -> Manifest:
    """The manifest of a step directory, whose files are not looked at.

    Raises:
        OSError: it is not there, or the volume fails.
        ValueError: it is damaged.
    """
    fields = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
    try:
        return Manifest(int(fields["step"]), str(fields["files"][STATE]["sha256"]), fields)
    except (LookupError, TypeError) as error:
        raise ValueError(f"{checkpoint / MANIFEST} is damaged: {error!r}") from None
