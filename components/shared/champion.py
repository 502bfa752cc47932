"""The model that a new one has to beat: where it lies, its own evaluation, and its weights."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from kfp_ddp.base.errors import InputError
from kfp_ddp.components.shared.bundle import CHAMPION, MANIFEST, SUCCESS, WEIGHTS, listed_in
from kfp_ddp.components.shared.destination import Destination, Folder, open_destination
from kfp_ddp.components.shared.evaluation import FILE, Evaluation

_FILES: tuple[str, ...] = (FILE, "metrics.json")  # beside a run, and in a bundle


@dataclass(frozen=True)
class Champion:
    """A model to beat: the folder it lies in, and the file in it that is its own evaluation."""

    where: Destination
    file: str
    evaluation: Evaluation

    def version(self) -> str:
        """What an export calls the bundle; '' where there is an evaluation without a bundle."""
        manifest = self.where.read(MANIFEST)
        return "" if manifest is None else hashlib.sha256(manifest).hexdigest()[:12]

    def unknown_class(self, challenger: Evaluation) -> str:
        """The first class with samples of the challenger that the champion was not taught."""
        known = {one.name for one in self.evaluation.classes}
        wanted = (one.name for one in challenger.classes if one.samples)
        return next((name for name in wanted if name not in known), "")

    def fetch_weights(self, folder: Path) -> Path:
        """Bring the bundle's weights to `folder`, checked against the bundle's manifest.

        Raises:
            InputError: the bundle is damaged, or has none.
        """
        manifest, success = self.where.read(MANIFEST) or b"", self.where.read(SUCCESS) or b""
        if success.decode(errors="replace").strip() != hashlib.sha256(manifest).hexdigest():
            raise self._damaged(f"{SUCCESS} is not the digest of {MANIFEST}")
        listed = listed_in(manifest.decode(errors="replace"))
        if WEIGHTS not in listed:
            raise InputError(
                f"the champion {self.where.uri} has no {WEIGHTS} to evaluate on this split: "
                "name a bundle that export wrote, or leave champion empty"
            )
        content = {name: self.where.read(name) for name in (self.file, WEIGHTS)}
        for name, found in content.items():
            if found is None:
                raise self._damaged(f"{name} is missing")
            if hashlib.sha256(found).hexdigest() != listed.get(name):
                raise self._damaged(f"{name} is not what {MANIFEST} lists")
        target = folder / WEIGHTS
        target.write_bytes(content[WEIGHTS] or b"")
        return target

    def _damaged(self, what: str) -> InputError:
        return InputError(
            f"the champion {self.where.uri} is damaged: {what}; "
            "upload that bundle again, or name another champion"
        )


def find(champion: str) -> Champion | None:
    """The champion at a path or URI; None while nothing is there yet.

    The folder of a model's exports stands for the one that was exported last.

    Args:
        champion: Folder of a model's exports, a bundle, or an evaluation or its folder.

    Raises:
        InputError: a place that is not there or cannot be read, a file that is not an evaluation.
    """
    version, names = None, _FILES
    if champion.endswith(".json"):
        folder, slash, name = champion.rpartition("/")
        where, names = open_destination(folder or slash or "."), (name,)
        needed = where.root if isinstance(where, Folder) else None
    else:
        where = open_destination(champion)
        needed = where.root.parent if isinstance(where, Folder) else None
        version = where.read(CHAMPION)
        if version is not None:
            where = open_destination(f"{where.uri}/{version.decode(errors='replace').strip()}")
    for name in names:
        text = where.read(name)
        if text is not None:
            record = Evaluation.parse(text.decode(errors="replace"), f"{where.uri}/{name}")
            return Champion(where, name, record)
    if version is not None:
        raise InputError(
            f"{champion}/{CHAMPION} names {where.uri}, where no evaluation lies: "
            f"upload that bundle again, or write the version to beat into {CHAMPION}"
        )
    if needed is not None and not needed.is_dir():
        raise InputError(
            f"champion is {champion}, but there is no folder {needed}: correct the path, or make "
            "that folder where the first model is still to be exported"
        )
    return None
