"""What was trained before for a model's exports, and what came of it, so that nobody does it again.

A note lies beside the bundles, as `<destination>/<model_name>/tried/<fingerprint>.json`: of a model
that was exported, or that was not blessed; a run that failed leaves none.
"""

import hashlib
import json
import time
from collections.abc import Collection, Mapping
from typing import Any, Literal

from pydantic import ValidationError

from kfp_ddp.core.settings import Stored
from kfp_ddp.core.text import printable
from kfp_ddp.models import succession
from kfp_ddp.models.bundle import LARGEST_SUCCESS, SUCCESS
from kfp_ddp.models.champion import pointed_at
from kfp_ddp.storage.destination import Destination

FOLDER = "tried"
_LARGEST = 4096
_REASON = 1000


class Attempt(Stored):
    """A training that came to a verdict."""

    format: Literal[1] = 1
    version: str
    """The bundle that was exported; '' where the model was not blessed."""
    champion: str
    """The version that it was compared with; '' for none."""
    reason: str
    at: float
    """Seconds since 1970."""

    @property
    def words(self) -> str:
        """What came of it and when."""
        day = time.strftime("%d %b %Y, %H:%M UTC", time.gmtime(self.at))
        came = f"exported as {self.version}" if self.version else self.reason
        return f"{came} ({day})"


def fingerprint(
    dataset_digest: str, training: Mapping[str, Any], gate: Mapping[str, Any], image: str
) -> str:
    """A name for what is trained on, how, by which code and rules: 16 hexadecimal digits.

    Args:
        dataset_digest: Of the version.
        training: What was set.
        gate: The rules that were set.
        image: Of the workers, where the job names one.
    """
    # kfp.local hands the whole numbers in a mapping on as floats.
    said = json.loads(
        json.dumps([dataset_digest, training, gate, image]),
        parse_float=lambda text: int(value) if (value := float(text)).is_integer() else value,
    )
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]


def note(where: Destination, name: str, *, version: str, champion: str, reason: str) -> None:
    """Write down what came of an attempt.

    Args:
        where: The folder of the model's exports.
        name: The attempt's fingerprint.
        version: As in `Attempt`.
        champion: As in `Attempt`.
        reason: As in `Attempt`.

    Raises:
        KfpDdpError: it cannot be written.
    """
    short = printable(reason)[:_REASON]  # an escape takes more of what may be read than a letter
    said = Attempt(version=version, champion=champion, reason=short, at=round(time.time(), 3))
    where.update(_file(name), lambda _: f"{said.model_dump_json()}\n".encode())


def unchanged(where: Destination, name: str) -> Attempt | None:
    """The attempt of this fingerprint, if another one would come to the same.

    It would not where its bundle is gone, or where another champion is to be beaten than then.

    Raises:
        InputError: the destination cannot be read.
    """
    found = _read(where, _file(name))
    if found is None:
        return None
    if found.version:
        there = where.read(f"{found.version}/{SUCCESS}", LARGEST_SUCCESS) is not None
        return found if there else None
    return found if pointed_at(where) == found.champion else None


def prune(where: Destination, keep: int, spared: Collection[str] = ()) -> list[str]:
    """Delete bundles that attempts have exported, and notes, but for the newest of each.

    The champion stays, and the one whose place it took or that it was compared with, for a way
    back. So does what no attempt has exported.

    Args:
        where: The folder of the model's exports.
        keep: How many bundles, and how many notes of models that were not blessed.
        spared: Versions that stay besides.

    Returns:
        The versions that are gone.

    Raises:
        InputError: the destination cannot be read or written.
    """
    files = [name for name, _ in where.list(f"{FOLDER}/")]
    notes = [(file, found) for file in files if (found := _read(where, file))]
    notes.sort(key=lambda one: one[1].at, reverse=True)
    exported = [one for one in notes if one[1].version]
    now = pointed_at(where)
    kept = {*spared, now, succession.replaced_by(succession.changes(where), now)}
    kept |= {found.champion for _, found in exported if found.version == now}
    kept |= {found.version for _, found in exported[:keep]}
    old = [one for one in exported if one[1].version not in kept]
    gone = list(dict.fromkeys(found.version for _, found in old))
    for version in gone:
        _delete(where, version)
    for file, _ in [*old, *[one for one in notes if not one[1].version][keep:]]:
        where.delete(file)
    return gone


def _delete(where: Destination, version: str) -> None:
    """A bundle's files, the mark of a whole one first: what is left of it is believed by nobody."""
    names = [name for name, _ in where.list(f"{version}/")]
    for name in sorted(names, key=lambda name: not name.endswith(f"/{SUCCESS}")):
        where.delete(name)


def _file(name: str) -> str:
    return f"{FOLDER}/{name}.json"


def _read(where: Destination, file: str) -> Attempt | None:
    """A note; None where there is none that can be understood."""
    content = where.read(file, _LARGEST)
    try:
        return Attempt.model_validate_json(content) if content is not None else None
    except ValidationError:
        return None
