"""The folder of a training at an address, for the step that follows its job."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

from kfp_ddp.core.errors import KfpDdpError
from kfp_ddp.core.folders import is_remote
from kfp_ddp.core.run_folder import RunFolder
from kfp_ddp.runs.workspace import checkpoints, files
from kfp_ddp.runs.workspace.address import local_folder
from kfp_ddp.runs.workspace.carried import CHECKPOINTS, EVERY_SECONDS
from kfp_ddp.runs.workspace.files import Changes
from kfp_ddp.runs.workspace.turns import Turns
from kfp_ddp.storage.destination import Destination, open_destination
from kfp_ddp.training.manifest import MANIFEST


class Followed:
    """A folder here that shows what the ranks tell there; the step's own files go there.

    Of checkpoints it has the manifests alone, as their names and digests are all the step needs.
    """

    def __init__(self, address: str, every: float = EVERY_SECONDS) -> None:
        self.address = address.rstrip("/")
        self.path = local_folder(address)
        self._changes = Changes(self.path, _is_the_steps)
        self._metrics_bytes = 0
        self._rounds = (
            Turns(self.address, self._fetch, every),
            Turns(self.address, self._changes.put, every),
        )

    def __enter__(self) -> Self:
        where = open_destination(self.address)
        files.fetch(where, (n for n, _ in where.list("launcher.") if files.plain(n)), self.path)
        (self.path / RunFolder.HEARTBEAT).touch()
        self._fetch(where)
        for each in self._rounds:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._rounds:
            each.stop()
        with contextlib.suppress(KfpDdpError):
            self._changes.put(open_destination(self.address))

    def look(self) -> None:
        """Bring what is there now; raises KfpDdpError."""
        self._fetch(open_destination(self.address))

    def _fetch(self, where: Destination) -> None:
        """Metrics where they grew, what the ranks tell, and the manifests of checkpoints."""
        sizes = dict(where.list(RunFolder.METRICS))
        if (size := sizes.get(RunFolder.METRICS, 0)) != self._metrics_bytes:
            files.fetch(where, (RunFolder.METRICS,), self.path)
            self._metrics_bytes = size
        ranks = [name for name, _ in where.list(f"{RunFolder.RANKS}/") if files.plain(name)]
        files.fetch(where, ranks, self.path)
        manifests = [f"{n}/{MANIFEST}" for n in checkpoints.complete(where, CHECKPOINTS)]
        files.fetch(where, (n for n in manifests if not (self.path / n).exists()), self.path)


def _is_the_steps(name: str) -> bool:
    return name.startswith("launcher.") and name != RunFolder.TRACE_REQUEST


@contextlib.contextmanager
def followed(place: str) -> Iterator[tuple[Path, Callable[[], None]]]:
    """The folder of a training whose job a step follows, and what brings it up to date.

    Args:
        place: A path, where there is nothing to bring, or an address.

    Raises:
        KfpDdpError: a bucket that cannot be read.
    """
    if not is_remote(place):
        yield Path(place), lambda: None
        return
    with Followed(place) as found:
        yield found.path, found.look
