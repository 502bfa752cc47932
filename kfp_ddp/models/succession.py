"""Who followed whom as the champion of a model: beside its versions, the newest last."""

import re
import time
from typing import Any

from pydantic import ValidationError

from kfp_ddp.core.settings import Stored
from kfp_ddp.storage.destination import Destination

FILE = "CHAMPIONS"
BACK = "rollback"
_LARGEST = 4096
_KEPT = 20


class Change(Stored):
    """One move of CHAMPION."""

    version: str
    replaced: str
    """'' for none."""
    by: str
    """The run that exported it, promote or rollback; '' where nobody said."""
    at: str
    """UTC, as 2027-01-31T03:04:05Z."""


def note(where: Destination, name: str, version: str, replaced: str, by: str) -> None:
    """Write down that a version became the champion, unless that was the last that was written.

    Args:
        where: The destination of exports.
        name: Of the model.
        version: The champion.
        replaced: The one before; '' for none.
        by: As in `Change`.

    Raises:
        KfpDdpError: it cannot be written.
    """
    who = re.sub(r"[^\w.:-]", "", by, flags=re.ASCII)[:64]  # so that all fit into a small file
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    made = Change(version=version, replaced=replaced, by=who, at=at)

    def change(content: bytes | None) -> bytes | None:
        known = _parsed(content)
        if known and known[-1].version == version:
            return None
        lines = [one.model_dump_json() for one in [*known[1 - _KEPT :], made]]
        return "".join(f"{line}\n" for line in lines).encode()

    where.update(f"{name}/{FILE}", change)


def changes(where: Destination, name: str = "") -> list[Change]:
    """The moves that are known, the newest last.

    Args:
        where: The destination of exports, or without a name the folder of one model's.
        name: Of the model.

    Raises:
        InputError: they cannot be read.
    """
    return _parsed(where.read(f"{name}/{FILE}".lstrip("/"), _LARGEST))


def replaced_by(known: list[Change], version: str) -> str | None:
    """Whose place a version took when it last came forward; None where that was not noted."""
    forward = (one for one in reversed(known) if one.by != BACK)
    return next((one.replaced for one in forward if one.version == version), None)


def _parsed(content: bytes | None) -> list[Change]:
    """Lines that are none of ours are left out: this only remembers, CHAMPION decides."""
    found: list[Any] = []
    for line in (content or b"").splitlines():
        try:
            found.append(Change.model_validate_json(line))
        except ValidationError:
            continue
    return found
