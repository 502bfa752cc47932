"""Records of earlier steps as typed models, which a step of another version may have written."""

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError


class Stored(BaseModel):
    """What a file holds, as it was written; fields of a later version are left out, NaN refused."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


def first_fault(error: ValidationError) -> str:
    """The first field that is missing or wrong, and why."""
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the document'}: {first['msg']}"


def mapping_in(content: bytes | str | None) -> dict[str, Any]:
    """The JSON object that a text holds; empty where it holds none, as one that was cut off."""
    try:
        found = json.loads(content or "{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def mapping_of(path: Path) -> dict[str, Any]:
    """The JSON object that a file holds; empty where it holds none, or is not there."""
    try:
        return mapping_in(path.read_bytes())
    except OSError:
        return {}
