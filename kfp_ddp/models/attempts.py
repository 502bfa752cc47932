"""Records of trainings in `<destination>/<model_name>/tried/`, so that none is done twice."""

import json
import time
from collections.abc import Collection, Mapping
from typing import Any, Literal

from pydantic import ValidationError

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.files import sha256_of_json
from kfp_ddp.core.log import log
from kfp_ddp.core.outputs import ChangesFacts
from kfp_ddp.core.settings import Stored
from kfp_ddp.core.step import Artifact, step, write_artifact
from kfp_ddp.core.text import cell, printable
from kfp_ddp.models import champion as champions
from kfp_ddp.models.release import check_model_name
from kfp_ddp.storage.kinds import open_store
from kfp_ddp.storage.store import Store

FOLDER = "tried"
_LARGEST = 4096
_LONGEST_REASON = 1000


class Attempt(Stored):
    """A training with a verdict."""

    format: Literal[1] = 1
    version: str
    """The exported bundle; '' if the model was not blessed."""
    champion: str
    """The version that it was compared with; '' for none."""
    reason: str
    at: float
    """Unix time in seconds."""

    @property
    def summary(self) -> str:
        """The result and its date."""
        day = time.strftime("%d %b %Y, %H:%M UTC", time.gmtime(self.at))
        result = f"exported as {self.version}" if self.version else self.reason
        return f"{result} ({day})"


@step
def run(
    *,
    digest: str,
    destination: str,
    model_name: str,
    training: Mapping[str, Any],
    gate: Mapping[str, Any],
    job: Mapping[str, Any],
    change_summary: Artifact,
) -> tuple[bool, str]:
    """Run the `changes` step; return whether to train, and the fingerprint."""
    if not destination:
        raise InputError(
            "destination is empty, so earlier trainings are unknown: give the location that models "
            "are exported to"
        )
    check_model_name(model_name)
    open_store(destination).prepare()  # which fails before the training, not after it
    where = open_store(f"{destination.rstrip('/')}/{model_name}")
    attempt = fingerprint(digest, training, gate, str(job.get("image", "")))
    earlier = unchanged(where, attempt)
    data = f"dataset {digest[:12]}"
    if earlier is None:
        reason = f"something new to train: {data} was not trained on with these settings"
    else:
        reason = f"nothing new: {data} was trained on with the same settings: {earlier.summary}"
    log.info(reason)
    advice = 'To train all the same, change a setting, such as training={"seed": 1}.'
    text = cell(f"{reason[0].upper()}{reason[1:]}.") + (f"\n\n{advice}" if earlier else "")
    facts = ChangesFacts(changed=earlier is None, reason=reason)
    write_artifact(change_summary, f"{text}\n", **facts)
    return earlier is None, attempt


def fingerprint(
    dataset_digest: str, training: Mapping[str, Any], gate: Mapping[str, Any], image: str
) -> str:
    """Return a name for data, settings, rules and the workers' image: 16 hexadecimal digits."""
    text = json.dumps([dataset_digest, training, gate, image])
    return sha256_of_json(json.loads(text, parse_float=_number))[:16]


def _number(text: str) -> float:
    """Return an integer where it is one: kfp.local passes those in a mapping as floats."""
    value = float(text)
    return int(value) if value.is_integer() else value


def note(where: Store, name: str, *, version: str, champion: str, reason: str) -> None:
    """Write the record of an attempt below a model's exports; `name` is its fingerprint."""
    short = printable(reason)[:_LONGEST_REASON]  # escapes in JSON count for the limit of the file
    attempt = Attempt(version=version, champion=champion, reason=short, at=round(time.time(), 3))
    where.update(f"{FOLDER}/{name}.json", lambda _: f"{attempt.model_dump_json()}\n".encode())


def unchanged(where: Store, name: str) -> Attempt | None:
    """Return the attempt of a fingerprint, unless its bundle or the champion to beat changed."""
    attempt = _read(where, f"{FOLDER}/{name}.json")
    if attempt is None:
        return None
    if attempt.version:
        return attempt if champions.is_complete(where, attempt.version) else None
    return attempt if champions.read_pointer(where) == attempt.champion else None


def prune(where: Store, keep: int, keep_also: Collection[str] = ()) -> list[str]:
    """Delete old records and bundles of attempts, all but the newest; return the deleted versions.

    `keep` exports and `keep` other records remain, also the champion, what it replaced or was
    compared with, `keep_also`, and every bundle that no attempt has exported.
    """
    exported: list[tuple[str, Attempt]] = []
    others: list[str] = []
    for file, attempt in _newest_first(where):
        if attempt.version:
            exported.append((file, attempt))
        else:
            others.append(file)
    current = champions.read_pointer(where)
    remaining = {*keep_also, current, champions.replaced_by(champions.history(where), current)}
    # What the champion was compared with, and the newest.
    remaining |= {attempt.champion for _, attempt in exported if attempt.version == current}
    remaining |= {attempt.version for _, attempt in exported[:keep]}
    versions = dict.fromkeys(attempt.version for _, attempt in exported)
    old = [version for version in versions if version not in remaining]
    deleted = [version for version in old if champions.delete(where, version)]
    of_deleted = [file for file, attempt in exported if attempt.version in deleted]
    for file in (*of_deleted, *others[keep:]):
        where.delete(file)
    return deleted


def _newest_first(where: Store) -> list[tuple[str, Attempt]]:
    """Return the names of valid records, and the records."""
    records: list[tuple[str, Attempt]] = []
    for file, _ in where.list(f"{FOLDER}/"):
        attempt = _read(where, file)
        if attempt is not None:
            records.append((file, attempt))
    return sorted(records, key=lambda record: record[1].at, reverse=True)


def _read(where: Store, file: str) -> Attempt | None:
    """Return a record; None if there is none or it is invalid."""
    content = where.read(file, _LARGEST)
    try:
        return Attempt.model_validate_json(content) if content is not None else None
    except ValidationError:
        return None
