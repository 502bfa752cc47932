"""Name and manifest of a checkpoint."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kfp_ddp.core.files import read_below, sha256_of_json

MANIFEST = "manifest.json"
STATE = "state.pt"
DIGEST = "sha256"
LARGEST = 16 << 20
"""Limit in bytes of a manifest, most of which are names of classes."""
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Manifest:
    """A parsed manifest: `digest` is the sha256 of state.pt, `fields` is the complete content."""

    path: Path
    """The checkpoint's folder."""
    step: int
    digest: str
    fields: dict[str, Any]


def read_manifest(checkpoint: Path) -> Manifest:
    """Read the manifest of a step directory; raise OSError, or ValueError if it is damaged."""
    try:
        fields = json.loads(read_below(checkpoint, MANIFEST, LARGEST))
        digest = fields.pop(DIGEST, None)  # early versions wrote none
        if digest is not None and digest != sha256_of_json(fields):
            raise ValueError(f"{checkpoint / MANIFEST} was altered")
        if list(fields["files"]) != [STATE]:
            raise ValueError(f"{checkpoint / MANIFEST} lists other files")
        state = fields["files"][STATE]
        return Manifest(checkpoint, int(fields["step"]), str(state["sha256"]), fields)
    except (LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{checkpoint / MANIFEST} is damaged: {error!r}") from None


def step_dir(directory: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint in a `checkpoints` folder."""
    return directory / f"step-{step:08d}"


def step_of(path: Path | str) -> int:
    """Return the step in the name of a step directory."""
    return int(Path(path).name.removeprefix("step-"))


def step_dirs(directory: Path) -> list[Path]:
    """List step directories, newest first, complete or not; raise OSError if the volume fails."""
    try:
        paths = [path for path in directory.iterdir() if _NAME.fullmatch(path.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(paths, key=step_of, reverse=True)
