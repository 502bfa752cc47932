"""The champion, which the next version has to beat: named in CHAMPION, its moves in CHAMPIONS."""

import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from kfp_ddp.core.errors import InputError, KfpDdpError
from kfp_ddp.core.settings import Stored
from kfp_ddp.datasets.names import reason_unsafe
from kfp_ddp.models.bundle import (
    DELETING,
    LARGEST_SUCCESS,
    MANIFEST,
    METRICS,
    NAME,
    SUCCESS,
    WEIGHTS,
    Bundle,
)
from kfp_ddp.models.evaluation import FILE, LARGEST, LARGEST_PREDICTIONS, Evaluation, Prediction
from kfp_ddp.models.signature import Signer
from kfp_ddp.models.signature import check as check_signature
from kfp_ddp.storage.address import check_address
from kfp_ddp.storage.folder import Folder
from kfp_ddp.storage.kinds import open_store
from kfp_ddp.storage.store import Store, sha256_of

CHAMPION = "CHAMPION"
CHAMPIONS = "CHAMPIONS"
ROLLBACK = "rollback"
"""`Change.by` of a move back."""
_FILES: tuple[str, ...] = (FILE, METRICS)  # in a run's folder, and in a bundle
_LARGEST_WEIGHTS = 4 << 30
_LARGEST_POINTER = 100
_LARGEST_HISTORY = 4096
_LONGEST_HISTORY = 20
_ADVICE = "upload that bundle again, or name another champion"
_VERSION = "[0-9a-f]{12}"


@dataclass(frozen=True)
class Champion:
    """A model to beat: a bundle or only an evaluation."""

    bundle: Bundle
    evaluation: Evaluation

    @property
    def version(self) -> str:
        """The version of its bundle; '' without one."""
        return self.bundle.version

    @property
    def uri(self) -> str:
        """Its URI."""
        return self.bundle.uri

    def predictions(self) -> dict[str, Prediction] | None:
        """Return the prediction for each sample by path; None without a file of predictions."""
        name = self.evaluation.predictions
        content = self.bundle.read(name, LARGEST_PREDICTIONS)
        if content is None:
            return None
        return self.evaluation.parse_predictions(content, f"{self.uri}/{name}")

    def fetch_weights(self, folder: Path) -> Path:
        """Download the weights to `folder`, checked against the manifest; return the file."""
        if WEIGHTS not in self.bundle.listed:
            raise InputError(
                f"the champion {self.uri} has no {WEIGHTS} to evaluate on this split: "
                "name a bundle that export wrote, or leave champion empty"
            )
        target = folder / WEIGHTS
        with target.open("w+b") as file:
            if not self.bundle.where.fetch(self.bundle.folder + WEIGHTS, file, _LARGEST_WEIGHTS):
                raise self.bundle.damaged(f"{WEIGHTS} is missing")
            file.seek(0)
            self.bundle.check(WEIGHTS, sha256_of(file))
        return target


class Change(Stored):
    """One move of CHAMPION."""

    version: str
    replaced: str
    """'' for none."""
    by: str
    """The run that exported the version, promote or rollback; '' if unknown."""
    at: str
    """UTC, as 2027-01-31T03:04:05Z."""


def find(
    champion: str, may_be_first: bool = False, signer: Signer | None = None
) -> Champion | None:
    """Return the champion at a path or URI; None while there is none yet.

    With `may_be_first` a folder may be missing on a volume: its first export creates it. Raise
    InputError if it is missing or damaged, or not signed by the required `signer`.
    """
    names = _FILES
    if champion.endswith(".json"):
        parent, slash, name = champion.rpartition("/")
        where = open_store(parent or slash or ".")
        names = (name,)
        required = where.root if isinstance(where, Folder) else None
        bundle = Bundle.at(where, "", "the champion", _ADVICE)
        _refuse_deleted(bundle)
    else:
        where = open_store(champion)
        required = where.root.parent if isinstance(where, Folder) else None
        bundle = locate(where, "the champion", _ADVICE)
    if bundle.manifest is None and bundle.model:
        names = ()  # a model's folder without a champion
    for name in names:
        content = bundle.read(name, LARGEST)
        if content is not None:
            check_signature(bundle, signer)
            record = Evaluation.parse(content.decode(errors="replace"), f"{bundle.uri}/{name}")
            return Champion(bundle, record)
    if bundle.manifest is not None:
        raise bundle.damaged(f"{names[-1]} is missing")
    if required is None or required.is_dir():
        return None
    if may_be_first and _on_volume(required):
        return None
    raise InputError(
        f"champion is {champion}, but the folder {required} does not exist: correct the path, "
        "or create that folder if no model was exported yet"
    )


def _on_volume(missing: Path) -> bool:
    """Return whether a folder is missing on a mounted volume, not where one should be mounted."""
    above = next(folder for folder in missing.resolve().parents if folder.is_dir())
    return above.stat().st_dev != Path("/").stat().st_dev


def list_versions(where: Store, name: str = "") -> dict[str, list[str]]:
    """Return the versions of complete bundles of one or all models at a destination, by model."""
    marks: dict[str, set[tuple[str, str]]] = {SUCCESS: set(), DELETING: set()}
    for path, _ in where.list(f"{name}/" if name else ""):
        parts = path.split("/")
        if len(parts) != 3:
            continue
        model, version, file = parts
        if file not in marks or not re.fullmatch(_VERSION, version):
            continue
        if not reason_unsafe(model):
            marks[file].add((model, version))
    versions: dict[str, list[str]] = {}
    for model, version in sorted(marks[SUCCESS] - marks[DELETING]):
        versions.setdefault(model, []).append(version)
    return versions


def is_complete(where: Store, path: str) -> bool:
    """Return whether a version, at a path below `where`, is complete and not being deleted."""
    # In this order: who deletes it marks it before anything else.
    return where.exists(f"{path}/{SUCCESS}") and not where.exists(f"{path}/{DELETING}")


def open_bundle(
    address: str, advice: str = "export it again", signer: Signer | None = None
) -> Bundle:
    """Return the complete bundle at an address; InputError if missing, damaged or not signed."""
    check_address("bundle", address)
    bundle = locate(open_store(address), "the bundle", advice)
    if bundle.manifest is None:
        raise InputError(
            f"there is no bundle at {address}: give the folder that a run names as its bundle, "
            f"with {SUCCESS} and {MANIFEST} in it, or promote a version of the model"
        )
    check_signature(bundle, signer)
    return bundle


def locate(where: Store, title: str, advice: str) -> Bundle:
    """Return the bundle at, or by, an address: its own, a run's in `bundle/`, or a champion.

    It has no manifest if there is none. A bundle and a CHAMPION in one place are refused.
    """
    bundle = Bundle.at(where, "", title, advice)
    pointer = read_pointer(where)
    name = where.place.rpartition("/")[2]
    if pointer or where.exists(CHAMPIONS):
        if bundle.manifest is not None:
            raise InputError(
                f"{where.uri} is a model's folder ({CHAMPION}) and a bundle ({MANIFEST}) in one: "
                "move the files of the bundle elsewhere"
            )
        if pointer:
            bundle = Bundle.at(where, f"{pointer}/", title, advice)
            if bundle.manifest is None:
                raise InputError(
                    f"{where.uri}/{CHAMPION} names {bundle.uri}, which does not exist: upload that "
                    f"bundle again, or write another version into {CHAMPION}"
                )
        bundle = replace(bundle, model=name)
        version = pointer
    elif bundle.manifest is not None:
        _refuse_deleted(bundle)
        version = name if re.fullmatch(_VERSION, name) else ""
    else:
        below = Bundle.at(where, f"{NAME}/", title, advice)
        return bundle if below.manifest is None else below
    if version and bundle.version != version:
        raise bundle.damaged(f"{MANIFEST} is that of {bundle.version}")
    return bundle


def _refuse_deleted(bundle: Bundle) -> None:
    """Refuse a version that is being deleted, which the one that CHAMPION names never is."""
    if bundle.where.exists(bundle.folder + DELETING):
        raise bundle.damaged("it is being deleted")


def read_pointer(where: Store, name: str = "") -> str:
    """Return the version that CHAMPION names, '' for none; without `name`, `where` is a model's."""
    file = f"{name}/{CHAMPION}".lstrip("/")
    return _parse_pointer(where.read(file, _LARGEST_POINTER), f"{where.uri}/{file}")


def move(where: Store, name: str, version: str, expected: str, by: str = "") -> str:
    """Make CHAMPION name `version` if it names `expected` now; return what it names afterwards.

    CHAMPIONS is written first: an entry that CHAMPION did not follow has no effect.
    """
    file = f"{name}/{CHAMPION}"
    current = ""
    if read_pointer(where, name) == expected != version:
        _add_to_history(where, name, version, expected, by)

    def change(content: bytes | None) -> bytes | None:
        nonlocal current
        before = _parse_pointer(content, f"{where.uri}/{file}")
        current = version if before == expected else before
        if before == current:
            return None
        if not is_complete(where, f"{name}/{version}"):
            raise InputError(
                f"{where.uri}/{name}/{version} cannot be the champion: it is not complete, or was "
                "deleted; publish it again"
            )
        return f"{version}\n".encode()

    where.update(file, change)
    return current


def delete(where: Store, version: str) -> bool:
    """Delete a bundle of a model, not the champion or what it replaced; return whether it did.

    First `DELETING` is written, then CHAMPION is compared and set, with another line feed: a move
    to the version at the same time fails, or is seen here. No one believes or completes a version
    with that mark, which goes last, so that an interrupted deletion can be completed by another.
    """
    mark = f"{version}/{DELETING}"
    own = os.urandom(8).hex().encode()
    deleted = False
    where.write(mark, own)

    def change(content: bytes | None) -> bytes | None:
        nonlocal deleted
        pointer = _parse_pointer(content, f"{where.uri}/{CHAMPION}")
        deleted = not _is_kept(where, version, pointer)
        if content is None:
            return None
        return f"{pointer}\n".encode() + b"\n" * (content.count(b"\n") % 64)

    where.update(CHAMPION, change)
    if deleted:
        _empty(where, version, own)
    else:
        where.delete(mark)
    return deleted


def _is_kept(where: Store, version: str, pointer: str) -> bool:
    """Return whether a version is the champion, or one to return to; none is without SUCCESS."""
    if pointer == version or not where.exists(f"{version}/{SUCCESS}"):
        return pointer == version
    return not pointer or replaced_by(history(where), pointer) == version


def _empty(where: Store, version: str, own: bytes) -> None:
    """Delete the files of a version, the mark last, as long as that is our `own`."""
    mark = f"{version}/{DELETING}"
    success = f"{version}/{SUCCESS}"
    while True:
        names = set(where.entries(f"{version}/")) - {mark}
        if not names:
            break
        for name in sorted(names, key=lambda name: name != success):
            if where.read(mark, LARGEST_SUCCESS) != own:
                return  # another one deletes it, or has: a new upload may be there
            where.delete(name)
    where.delete(mark)
    with suppress(KfpDdpError):  # if a new upload is there already
        where.delete(f"{version}/")


def compared_with(champion: str, champion_version: str, where: Store, name: str) -> str:
    """Return the version that CHAMPION has to name: the gate's if of this model, else its own."""
    location = f"{open_store(champion).place}/" if champion else ""
    own = location.startswith(f"{where.place}/{name}/")
    current = read_pointer(where, name)
    return champion_version if own else current


def _add_to_history(where: Store, name: str, version: str, replaced: str, by: str) -> None:
    """Append a change to CHAMPIONS, unless it is the newest one."""
    author = re.sub(r"[^\w.:-]", "", by, flags=re.ASCII)[:64]  # keeps the file small
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    newest = Change(version=version, replaced=replaced, by=author, at=at)

    def change(content: bytes | None) -> bytes | None:
        known = _parse_history(content)
        if known and known[-1].model_copy(update={"at": at}) == newest:
            return None
        lines = [one.model_dump_json() for one in [*known[1 - _LONGEST_HISTORY :], newest]]
        return "".join(f"{line}\n" for line in lines).encode()

    where.update(f"{name}/{CHAMPIONS}", change)


def history(where: Store, name: str = "") -> list[Change]:
    """Return the moves of CHAMPION, the newest last, with ones that failed; see `read_pointer`."""
    return _parse_history(where.read(f"{name}/{CHAMPIONS}".lstrip("/"), _LARGEST_HISTORY))


def replaced_by(known: list[Change], version: str) -> str | None:
    """Return what this version replaced when last promoted, by moves that happened; or None."""
    at = version  # what CHAMPION named after the change that is looked at
    for change in reversed(known):
        if change.version != at:
            continue  # CHAMPION did not follow it
        if at == version and change.by != ROLLBACK:
            return change.replaced
        at = change.replaced
    return None


def _parse_pointer(content: bytes | None, uri: str) -> str:
    if content is None:
        return ""
    text = content.decode(errors="replace").strip()
    if not re.fullmatch(_VERSION, text):
        raise InputError(
            f"{uri} names no version, which is 12 hexadecimal digits: write the version to beat "
            "into it, or delete it"
        )
    return text


def _parse_history(content: bytes | None) -> list[Change]:
    """Return the valid lines; the others are ignored, as only CHAMPION decides."""
    parsed: list[Change] = []
    for line in (content or b"").splitlines():
        try:
            parsed.append(Change.model_validate_json(line))
        except ValidationError:
            continue
    return parsed
