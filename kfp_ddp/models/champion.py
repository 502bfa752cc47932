"""The model that a new one has to beat: where it lies, what is known of it, who takes its place."""

import re
from dataclasses import dataclass
from pathlib import Path

from kfp_ddp.core.errors import InputError
from kfp_ddp.models import succession
from kfp_ddp.models.bundle import MANIFEST, METRICS, WEIGHTS
from kfp_ddp.models.evaluation import FILE, LARGEST, LARGEST_PREDICTIONS, Evaluation, Told
from kfp_ddp.models.sealed import Sealed
from kfp_ddp.storage.destination import Destination, Folder, open_destination, sha256_of

CHAMPION = "CHAMPION"
"""Beside the versions of a model: the one that a next one has to beat."""
_FILES: tuple[str, ...] = (FILE, METRICS)  # beside a run, and in a bundle
_LARGEST_WEIGHTS = 4 << 30
_LARGEST_POINTER = 100
_ADVICE = "upload that bundle again, or name another champion"


@dataclass(frozen=True)
class Champion:
    """A model to beat: a bundle or less, the name of its evaluation in it, and what that says."""

    sealed: Sealed
    file: str
    evaluation: Evaluation

    @property
    def version(self) -> str:
        """What an export calls the bundle; '' without one."""
        return self.sealed.version

    @property
    def uri(self) -> str:
        """Where it lies."""
        return self.sealed.uri

    def unknown_class(self, challenger: Evaluation) -> str:
        """The first class with samples of the challenger that the champion was not taught."""
        known = {one.name for one in self.evaluation.classes}
        wanted = (one.name for one in challenger.classes if one.samples)
        return next((name for name in wanted if name not in known), "")

    def told(self) -> dict[str, Told] | None:
        """For each sample of its own evaluation what it is, and whether that was told.

        Returns:
            By its path; None if the predictions are not there.

        Raises:
            InputError: they are damaged, or not those of the evaluation.
        """
        name = self.evaluation.predictions
        content = self.sealed.read(name, LARGEST_PREDICTIONS)
        return None if content is None else self.evaluation.told(content, f"{self.uri}/{name}")

    def fetch_weights(self, folder: Path) -> Path:
        """Bring the bundle's weights to `folder`, checked against the bundle's manifest.

        Raises:
            InputError: the bundle is damaged, or has none.
        """
        if WEIGHTS not in (self.sealed.listed or {}):
            raise InputError(
                f"the champion {self.uri} has no {WEIGHTS} to evaluate on this split: "
                "name a bundle that export wrote, or leave champion empty"
            )
        target = folder / WEIGHTS
        with target.open("w+b") as file:
            if not self.sealed.where.fetch(self.sealed.folder + WEIGHTS, file, _LARGEST_WEIGHTS):
                raise self.sealed.damaged(f"{WEIGHTS} is missing")
            file.seek(0)
            self.sealed.check(WEIGHTS, sha256_of(file))
        return target


def find(champion: str) -> Champion | None:
    """The champion at a path or URI; None while nothing is there yet.

    The folder of a model's exports stands for the version that CHAMPION in it names. A bundle is
    believed only where its evaluation is what its manifest lists.

    Args:
        champion: Folder of a model's exports, a bundle, or an evaluation or its folder.

    Raises:
        InputError: a place that is not there or cannot be read, a bundle that is damaged, a file
            that is not an evaluation.
    """
    pointed, names = "", _FILES
    if champion.endswith(".json"):
        parent, slash, name = champion.rpartition("/")
        where, names = open_destination(parent or slash or "."), (name,)
        needed = where.root if isinstance(where, Folder) else None
    else:
        where = open_destination(champion)
        needed = where.root.parent if isinstance(where, Folder) else None
        pointed = pointed_at(where)
    folder = f"{pointed}/" if pointed else ""
    sealed = Sealed.at(where, folder, "the champion", _ADVICE)
    uri = sealed.uri
    if pointed and sealed.listed is None:
        raise InputError(
            f"{where.uri}/{CHAMPION} names {uri}, where no bundle lies: "
            f"upload that bundle again, or write the version to beat into {CHAMPION}"
        )
    if pointed and sealed.version != pointed:
        raise sealed.damaged(f"{MANIFEST} is that of {sealed.version}")
    for name in names:
        content = sealed.read(name, LARGEST)
        if content is not None:
            record = Evaluation.parse(content.decode(errors="replace"), f"{uri}/{name}")
            return Champion(sealed, name, record)
    if sealed.listed is not None:
        raise sealed.damaged(f"{names[-1]} is missing")
    if needed is not None and not needed.is_dir():
        raise InputError(
            f"champion is {champion}, but there is no folder {needed}: correct the path, or make "
            "that folder where the first model is still to be exported"
        )
    return None


def pointed_at(where: Destination, name: str = "") -> str:
    """The version that CHAMPION in the folder of a model's exports names; '' if there is none.

    Raises:
        InputError: it cannot be read, or names no version.
    """
    file = f"{name}/{CHAMPION}".lstrip("/")
    return _version_in(where.read(file, _LARGEST_POINTER), f"{where.uri}/{file}")


def move(where: Destination, name: str, version: str, expected: str, by: str = "") -> str:
    """Make CHAMPION name `version` if it names `expected` now, or is absent where that is ''.

    Args:
        where: The destination of exports.
        name: Of the model.
        version: An uploaded one.
        expected: What it was compared with.
        by: Who asks: the run that exported it, promote or rollback.

    Returns:
        What CHAMPION names after that: `version`, or what came first.

    Raises:
        InputError: it cannot be read or written.
        StorageError: other writers always came first, or there are no locks.
    """
    file, named = f"{name}/{CHAMPION}", ""

    def change(content: bytes | None) -> bytes | None:
        nonlocal named
        found = _version_in(content, f"{where.uri}/{file}")
        named = version if found == expected else found
        return None if found == named else f"{version}\n".encode()

    where.update(file, change)
    if named == version:
        succession.note(where, name, version, expected, by)
    return named


def compared_with(champion: str, champion_version: str, where: Destination, name: str) -> str:
    """The version that CHAMPION of a model has to name for its next version to take the place.

    It is what the gate compared with, where the gate's champion was this model's: its CHAMPION, or
    a version beside it; else what CHAMPION names now.

    Args:
        champion: As the gate was given it; '' for none.
        champion_version: As the gate returned it.
        where: The destination of exports.
        name: Of the model.

    Raises:
        InputError: CHAMPION cannot be read, or names no version.
    """
    now = pointed_at(where, name)
    of_gate = f"{open_destination(champion).place}/" if champion else ""
    return champion_version if of_gate.startswith(f"{where.place}/{name}/") else now


def _version_in(content: bytes | None, uri: str) -> str:
    if content is None:
        return ""
    text = content.decode(errors="replace").strip()
    if not re.fullmatch(r"[0-9a-f]{12}", text):
        raise InputError(
            f"{uri} names no version, which is 12 hexadecimal digits: write the version to beat "
            "into it, or delete it"
        )
    return text
