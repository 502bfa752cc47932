"""The other files of a run's folder: what changed here goes there, and the other way around."""

import filecmp
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from kfp_ddp.runs.workspace.checkpoints import is_of_one
from kfp_ddp.storage.destination import Destination

_LARGEST = 1 << 40
OUTGOING = ".outgoing"


class Changes:
    """The files of a folder that changed since they were put to its address last.

    They go in the order in which they were written, so that what says "complete" goes last. Hidden
    files, links and checkpoints are none of them.
    """

    def __init__(self, folder: Path, wanted: Callable[[str], bool] = lambda name: True) -> None:
        self.folder, self._wanted = folder, wanted
        self._known: dict[str, tuple[int, int]] = {}

    def note(self, below: str = "") -> None:
        """Take what is here now, in this folder or in one below it, as what is there."""
        self._known |= {name: stamp for name, stamp in self._files() if name.startswith(below)}

    def delete(self, where: Destination) -> None:
        """Delete there what was here and is gone; raises KfpDdpError."""
        for name in self._known.keys() - {name for name, _ in self._files()}:
            where.delete(name)
            del self._known[name]

    def put(self, where: Destination) -> None:
        """Put what changed; raises KfpDdpError, and then goes on from there the next time."""
        changed = [each for each in self._files() if self._known.get(each[0]) != each[1]]
        aside = self.folder / OUTGOING / "file"
        aside.parent.mkdir(exist_ok=True)
        for name, stamp in sorted(changed, key=lambda each: each[1]):
            try:
                shutil.copyfile(self.folder / name, aside)  # it may grow while it is sent
            except FileNotFoundError:
                continue
            where.put(aside, name)
            self._known[name] = stamp

    def _files(self) -> Iterator[tuple[str, tuple[int, int]]]:
        for at, folders, files in os.walk(self.folder):
            folders[:] = [each for each in folders if not each.startswith(".")]
            for path in (Path(at, file) for file in files if not file.startswith(".")):
                name = path.relative_to(self.folder).as_posix()
                if is_of_one(name) or not self._wanted(name) or path.is_symlink():
                    continue
                try:
                    about = path.stat()
                except FileNotFoundError:
                    continue
                yield name, (about.st_mtime_ns, about.st_size)


def fetch(where: Destination, names: Iterable[str], folder: Path) -> None:
    """Bring files to a folder, each whole or not at all; one that is the same stays untouched.

    Raises:
        KfpDdpError: they cannot be read.
        OSError: this machine has no room for them.
    """
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.incoming")
        with aside.open("w+b") as into:
            found = where.fetch(name, into, _LARGEST)
        if found and not (path.exists() and filecmp.cmp(aside, path, shallow=False)):
            os.replace(aside, path)
        else:
            aside.unlink()


def plain(name: str) -> bool:
    """Whether a listed name can be a file of ours: no way up, nothing hidden."""
    return all(part and not part.startswith(".") for part in name.split("/"))
