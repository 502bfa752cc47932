"""The folder of a run as a step works in it: that on a claim itself, or a copy of what it needs."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.core.folders import is_remote
from kfp_ddp.core.run_folder import open_run_dir
from kfp_ddp.runs.workspace import checkpoints, files
from kfp_ddp.runs.workspace.address import local_folder, run_address
from kfp_ddp.runs.workspace.files import Changes
from kfp_ddp.storage import leases
from kfp_ddp.storage.destination import Destination, open_destination


class Opened:
    """A run's folder, `path` on this machine."""

    def __init__(self, address: str, path: Path, where: Destination | None) -> None:
        self._address, self.path, self._where = address.rstrip("/"), path, where
        self._changes = Changes(path)

    def here(self, place: str) -> Path:
        """A folder of the run on this machine; from a bucket it is brought, whole.

        Raises:
            InputError: it lies elsewhere, or is a checkpoint that is not there whole.
            KfpDdpError: the bucket cannot be read, or this machine has no room.
        """
        if self._where is None or not is_remote(place):
            return Path(place)
        if not f"{place}/".startswith(f"{self._address}/"):
            raise InputError(f"{place} is not of the run {self._address}: give both of one run")
        name = place.rstrip("/")[len(self._address) + 1 :]
        with _room(self.path, place):
            if checkpoints.is_of_one(f"{name}/file"):
                if not checkpoints.fetch(self._where, name, self.path):
                    raise InputError(f"{place} is no whole checkpoint: give the one train returned")
            else:
                self.fetch(f"{name}/" if name else "")
        return self.path / name

    def file(self, place: str) -> Path:
        """A file of the run on this machine, with all that lies in its folder; raises as `here`."""
        folder, _, name = place.rpartition("/")
        return self.here(folder) / name if is_remote(place) else Path(place)

    def there(self, path: Path) -> str:
        """What other steps call a file of this folder."""
        if self._where is None:
            return str(path)
        return f"{self._address}/{path.relative_to(self.path).as_posix()}"

    def fetch(self, below: str, deep: bool = True) -> None:
        """Bring the files whose names begin with `below`; `deep` those in folders, too."""
        if self._where is not None:
            found = [name for name, _ in self._where.list(below) if files.plain(name)]
            names = [n for n in found if deep or "/" not in n]
            files.fetch(self._where, (n for n in names if not n.startswith("launcher.")), self.path)
            self._changes.note(below)

    def put(self) -> None:
        """Put what was written, without what was removed; raises KfpDdpError."""
        if self._where is not None:
            with _room(self.path, self._address):
                self._changes.delete(self._where)
                self._changes.put(self._where)


def own_folder(work: str, run_id: str, task: str) -> str:
    """The folder of a run's task, where something can be written: a path, or an address.

    Args:
        work: Folder, or bucket's prefix, of all runs.
        run_id: Id of the pipeline run.
        task: Its `task_title`.

    Raises:
        InputError, StorageError: it cannot be.
    """
    if not is_remote(work):
        return str(open_run_dir(work, run_id, task))
    place = run_address(work, run_id, task)
    leases.begin(open_destination(place))
    return place


@contextlib.contextmanager
def opened(run_dir: str, holder: str) -> Iterator[Opened]:
    """A run's folder, with the files that lie directly in it; what a step writes there is kept.

    Args:
        run_dir: A path, or an address.
        holder: Who uses it, while the block runs.

    Raises:
        KfpDdpError: a bucket that cannot be read, or did not take what was written.
    """
    if not is_remote(run_dir):
        yield Opened(run_dir, Path(run_dir), None)
        return
    path = local_folder(f"{run_dir.rstrip('/')}/{holder}.{os.getpid()}")
    found = Opened(run_dir, path, open_destination(run_dir))
    try:
        with leases.holding(run_dir, holder):
            with _room(path, run_dir):
                found.fetch("", deep=False)
            yield found
            found.put()
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _room(path: Path, place: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{path} cannot hold what lies at {place}: {error.strerror or error}; give the pod "
            "more ephemeral storage"
        ) from None
