"""The bundle that a run uploaded, where its own files are gone or cannot be had."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kfp_ddp.client import models
from kfp_ddp.client.run_files import PlacedFiles, RunFiles
from kfp_ddp.core.errors import KfpDdpError
from kfp_ddp.core.run_folder import RunFolder
from kfp_ddp.storage.destination import open_destination


class UploadedBundle(RunFiles):
    """A bundle at a destination, named as that of a task called `uploaded`."""

    BELOW = f"uploaded/{RunFolder('').bundle.name}/"

    def __init__(self, uri: str) -> None:
        self._there = PlacedFiles(uri)
        self.where = self._there.where

    def sizes(self) -> dict[str, int]:
        """Bytes of each file by its name."""
        return {f"{self.BELOW}{name}": size for name, size in self._there.sizes().items()}

    def bring(self, names: Iterable[str], folder: Path) -> None:
        """Copy files to a folder."""
        self._there.bring([n.removeprefix(self.BELOW) for n in names], folder / self.BELOW)


def uploaded(run_id: str, parameters: Mapping[str, Any]) -> RunFiles | None:
    """What the run exported to its destination; None where nothing is known of it there."""
    destination, name = parameters.get("destination"), parameters.get("model_name")
    if not destination or not name:
        return None
    try:
        found = models.versions(open_destination(str(destination)), str(name))
    except KfpDdpError:
        return None
    whole = [each.uri for each in found if each.run_id == run_id and not each.damaged]
    return UploadedBundle(whole[0]) if whole else None
