"""The files that a run wrote, in a folder or below a URI; `claim_files` reads those of a PVC."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path

from kfp_ddp.core.errors import StorageError, full
from kfp_ddp.runs.workspace import fetch, is_plain
from kfp_ddp.storage.kinds import open_store


class RunFiles(ABC):
    """Files of one run, named `<task>/<file>`; hidden files and links are left out."""

    where: str
    """Their location, for messages."""

    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """Return the size of each file in bytes, by its name; empty if there are none."""

    @abstractmethod
    def fetch(self, names: Iterable[str], folder: Path) -> None:
        """Copy files to a folder, each atomically; skip those that were deleted."""


class StoredFiles(RunFiles):
    """The files of a run below a local folder or a URI such as gs://."""

    def __init__(self, uri: str, prefix: str = "") -> None:
        """Open the folder; its files are named `<prefix><file>`."""
        self.where, self._prefix = uri.rstrip("/"), prefix
        self._store = open_store(self.where)

    def sizes(self) -> dict[str, int]:
        """Return the size of each file in bytes, by its name."""
        listed = self._store.list("")
        return {f"{self._prefix}{name}": size for name, size in listed if is_plain(name)}

    def fetch(self, names: Iterable[str], folder: Path) -> None:
        """Copy files to a folder."""
        stored = [name.removeprefix(self._prefix) for name in names]
        try:
            fetch(self._store, stored, folder / self._prefix)
        except OSError as error:
            raise StorageError(full(error, folder)) from None
