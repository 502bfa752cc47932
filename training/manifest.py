"""A checkpoint's name and manifest, read without torch."""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
STATE = "state.pt"
DIGEST = "sha256"
_NAME = re.compile(r"step-(\d{8,})")


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
    try:
        fields = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        told = fields.pop(DIGEST, None)
        if told is not None and told != digest_of(fields):
            raise ValueError(f"{checkpoint / MANIFEST} was altered")
        if list(fields["files"]) != [STATE]:
            raise ValueError(f"{checkpoint / MANIFEST} tells of other files")
        return Manifest(int(fields["step"]), str(fields["files"][STATE]["sha256"]), fields)
    except (LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{checkpoint / MANIFEST} is damaged: {error!r}") from None


def digest_of(fields: dict[str, Any]) -> str:
    """The sha256 of a manifest's fields but itself; earlier versions wrote none."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def step_dir(directory: Path, step: int) -> Path:
    """The folder of a step's checkpoint in a `checkpoints` folder."""
    return directory / f"step-{step:08d}"


def step_of(path: Path | str) -> int:
    """The step that a step directory's name tells."""
    return int(Path(path).name.removeprefix("step-"))


def step_dirs(directory: Path) -> list[Path]:
    """Step directories, newest first, whole or not; none where there is no such folder.

    Newest by step, not by a clock.

    Raises:
        OSError: the volume fails.
    """
    try:
        found = [path for path in directory.iterdir() if _NAME.fullmatch(path.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(found, key=step_of, reverse=True)
