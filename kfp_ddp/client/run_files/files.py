"""What can be asked of a run's files, wherever they lie."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path

from kfp_ddp.core.errors import StorageError, full
from kfp_ddp.runs.workspace import files
from kfp_ddp.storage.destination import open_destination


class RunFiles(ABC):
    """Files of one run by name, `<task>/<file>`; hidden ones and links are none of them."""

    where: str
    """Where they lie, for a person."""

    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """Bytes of each file by its name; empty where the run left none.

        Raises:
            KfpDdpError: they cannot be listed.
        """

    @abstractmethod
    def bring(self, names: Iterable[str], folder: Path) -> None:
        """Copy files to a folder, each whole or not at all; one that is gone is passed over.

        Raises:
            KfpDdpError: they cannot be read, or there is no room for them.
        """


class PlacedFiles(RunFiles):
    """The files of a run below a folder of this machine, or an address such as gs://."""

    def __init__(self, place: str) -> None:
        self.where = place.rstrip("/")
        self._place = open_destination(self.where)

    def sizes(self) -> dict[str, int]:
        """Bytes of each file by its name."""
        return {name: size for name, size in self._place.list("") if files.plain(name)}

    def bring(self, names: Iterable[str], folder: Path) -> None:
        """Copy files to a folder."""
        try:
            files.fetch(self._place, names, folder)
        except OSError as error:
            raise StorageError(full(error, folder)) from None
