"""A training's folder on this machine, which a bucket keeps: fetched first, put while it runs."""

import contextlib
import itertools
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from kfp_ddp.core.errors import KfpDdpError, StorageError, UnavailableError
from kfp_ddp.core.folders import is_remote
from kfp_ddp.core.run_folder import RunFolder
from kfp_ddp.runs.workspace import checkpoints, files
from kfp_ddp.runs.workspace.address import local_folder
from kfp_ddp.runs.workspace.files import Changes
from kfp_ddp.runs.workspace.turns import Turns
from kfp_ddp.storage.destination import Destination, open_destination
from kfp_ddp.training.config import TrainConfig
from kfp_ddp.training.manifest import MANIFEST, step_of

EVERY_SECONDS = 10.0
LAST_SECONDS = 600.0
"""How long the last files are tried to be put where the bucket is away at the end."""
LAST_OF_FAILED_SECONDS = 30.0
CHECKPOINTS = RunFolder.CHECKPOINTS
LOGS = RunFolder.LOGS
FETCHED = (RunFolder.HEARTBEAT, RunFolder.TRACE_REQUEST)
"""What others write there for the ranks."""


class Carried:
    """The folder of a training at an address; a context in which it is kept up to date there.

    Entering it brings what an earlier attempt left, with the newest checkpoint that verifies. Of
    the pods of a job each puts what its own ranks write.
    """

    def __init__(
        self, address: str, keep: int, keep_best: bool = False, every: float = EVERY_SECONDS
    ) -> None:
        """Begin with nothing.

        Args:
            address: Of the folder.
            keep: How many of the newest checkpoints stay there.
            keep_best: Whether the best one does, too.
            every: Seconds after which it is looked what changed.
        """
        self.address, self.keep, self.keep_best = address.rstrip("/"), keep, keep_best
        self.path = local_folder(address)
        self.resumed = ""
        """The checkpoint that was fetched, by its name; '' for none."""
        self._there: set[str] = set()
        self._earlier = ""
        """Where the checkpoints of another start lie, once this one has set them aside."""
        self._setting_aside = threading.Lock()
        self._changes = Changes(self.path, self._is_ours)
        self._over = False
        self._rounds = (
            Turns(self.address, self._put_checkpoints, every / 10),
            Turns(self.address, self._put_files, every),
            Turns(self.address, self._fetch_from_others, every),
        )

    def __enter__(self) -> Self:
        try:
            where = open_destination(self.address)
            names = [name for name, _ in where.list("") if "/" not in name and files.plain(name)]
            wanted = (name for name in names if not name.startswith("launcher."))
            files.fetch(where, wanted, self.path)
            self.resumed = checkpoints.fetch_newest(where, CHECKPOINTS, self.path)
        except OSError as error:
            raise StorageError(
                f"{self.path} has no room for what lies at {self.address} ({error.strerror}): "
                "give the pods more ephemeral storage"
            ) from None
        if self.resumed:
            self._there.add(self.resumed)
            best = checkpoints.best_of(self.path / self.resumed) if self.keep_best else ""
            if best not in ("", self.resumed) and checkpoints.fetch(where, best, self.path):
                self._there.add(best)
            print(f"{self.resumed} of {self.address} is where the training goes on", flush=True)
        self._changes.note()
        for each in self._rounds:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._rounds:
            each.stop()

    def finish(self, seconds: float = LAST_SECONDS) -> None:
        """Put all that is left, when the training writes no more.

        Raises:
            UnavailableError: the bucket did not take it in so many seconds.
        """
        for each in self._rounds:
            each.stop()
        where, deadline = open_destination(self.address), time.monotonic() + seconds
        self._over = True
        while True:
            try:
                self._put_checkpoints(where)
                return self._put_files(where)
            except KfpDdpError as error:
                if time.monotonic() > deadline:
                    raise UnavailableError(
                        f"the training ended, but what it wrote last cannot be put: {error}"
                    ) from None
                print(f"warning: {error}; trying again", flush=True)
                time.sleep(2)

    def _put_checkpoints(self, where: Destination) -> None:
        """Put the newest checkpoint unless it is there, and the best where that is to stay."""
        self._set_aside(where)
        found = [path for path in self.path.glob(f"{CHECKPOINTS}/step-*[0-9]") if _whole(path)]
        newest = max(found, key=step_of, default=None)
        if newest is None:
            return
        best = ""
        with contextlib.suppress(OSError, ValueError):  # removed meanwhile
            best = checkpoints.best_of(newest) if self.keep_best else ""
        wanted = [each for each in found if each == newest or self._name(each) == best]
        missing = [each for each in wanted if self._name(each) not in self._there]
        for each in sorted(missing, key=lambda path: path != newest):
            self._put_checkpoint(where, each)
        if missing:
            checkpoints.prune(where, CHECKPOINTS, self.keep, best)

    def _put_checkpoint(self, where: Destination, checkpoint: Path) -> None:
        name = self._name(checkpoint)
        held = self.path / files.OUTGOING / checkpoint.name
        shutil.rmtree(held, ignore_errors=True)
        held.mkdir(parents=True)
        began = time.monotonic()
        try:
            # The training removes old ones, perhaps while one is on its way.
            for file in checkpoint.iterdir():
                os.link(file, held / file.name)
            checkpoints.upload(where, name, held)
        except FileNotFoundError:
            return
        finally:
            shutil.rmtree(held, ignore_errors=True)
        self._there.add(name)
        print(f"{name} is at {self.address} ({time.monotonic() - began:.1f} s)", flush=True)

    def _name(self, checkpoint: Path) -> str:
        return checkpoint.relative_to(self.path).as_posix()

    def _is_ours(self, name: str) -> bool:
        """What the ranks write; their output, which the job's log has, at the end alone."""
        if name.startswith("launcher.") or name == RunFolder.PROCESS:
            return False
        return self._over or not name.startswith(f"{LOGS}/")

    def _put_files(self, where: Destination) -> None:
        self._set_aside(where)  # before it is told that this start has begun
        self._changes.put(where)

    def _set_aside(self, where: Destination) -> None:
        """Move there what a training that begins anew moved aside here: it counts no more."""
        with self._setting_aside:
            aside = f"{CHECKPOINTS}.old-"
            if self.resumed not in self._there:
                return
            if not any(self.path.glob(f"{aside}*/{self.resumed.rpartition('/')[2]}")):
                return
            if not self._earlier:
                taken = {name.partition("/")[0] for name, _ in where.list(aside)}
                free = (f"{aside}{number}" for number in itertools.count())
                self._earlier = next(name for name in free if name not in taken)
            checkpoints.move(where, CHECKPOINTS, self._earlier, self.path / files.OUTGOING)
            self._there.clear()
            print(f"earlier checkpoints are in {self.address}/{self._earlier} now", flush=True)

    def _fetch_from_others(self, where: Destination) -> None:
        files.fetch(where, FETCHED, self.path)


def _whole(checkpoint: Path) -> bool:
    return (checkpoint / MANIFEST).exists()


@contextlib.contextmanager
def carried(config: TrainConfig) -> Iterator[Path]:
    """The folder that a training works in: that at a path itself, or one that is carried.

    Args:
        config: Its output_dir is the path, or the address.

    Raises:
        KfpDdpError: a bucket that cannot be read, or did not take what the training left.
    """
    place = config.output_dir
    if not is_remote(place):
        yield Path(place)
        return
    with Carried(place, config.keep_checkpoints, config.keep_best) as found:
        try:
            yield found.path
        except BaseException:
            with contextlib.suppress(KfpDdpError):
                found.finish(LAST_OF_FAILED_SECONDS)
            raise
        found.finish()
