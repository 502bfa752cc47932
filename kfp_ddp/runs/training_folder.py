"""The folder of a training in a bucket: as its ranks write it, and as the step follows it."""

import contextlib
import itertools
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

from kfp_ddp.core.errors import InputError, KfpDdpError, UnavailableError, writing
from kfp_ddp.core.folders import is_remote
from kfp_ddp.core.log import log
from kfp_ddp.core.run_folder import RunFolder
from kfp_ddp.datasets.access import local_dataset
from kfp_ddp.models import weights_download
from kfp_ddp.runs import checkpoints
from kfp_ddp.runs.workspace import MORE_STORAGE, OUTGOING, RemoteFolder
from kfp_ddp.training.spec.config import TrainConfig
from kfp_ddp.training.spec.manifest import MANIFEST, step_of

EVERY_SECONDS = 10.0
LAST_SECONDS = 600.0
"""How long the last upload is retried while the bucket cannot be reached."""
LAST_OF_FAILED_SECONDS = 30.0
CHECKPOINTS = RunFolder.CHECKPOINTS


class TrainingFolder(RemoteFolder):
    """The folder that ranks of this pod write to, with the files of an earlier attempt."""

    def __init__(
        self, uri: str, keep: int, keep_best: bool = False, every: float = EVERY_SECONDS
    ) -> None:
        """Create an empty local folder; `keep` and `keep_best` are as in the training."""
        super().__init__(uri)
        self.keep = keep
        self.keep_best = keep_best
        self.resumed = ""
        """Name of the checkpoint that was downloaded; '' for none."""
        self._remote: set[str] = set()
        """Names of checkpoints that the bucket has."""
        self._earlier = ""
        """Folder of earlier checkpoints, once this training has moved them aside."""
        self._moving = threading.Lock()
        self.every(every / 10, self._upload_checkpoints)
        self.every(every, self._upload_files)
        self.every(every, lambda: self.download((RunFolder.HEARTBEAT,)))

    def __enter__(self) -> Self:
        with writing(self.path, MORE_STORAGE):
            names = (name for name in self.names() if "/" not in name)
            self.download(name for name in names if not name.startswith("launcher."))
            self.resumed = checkpoints.fetch_newest(self.store, CHECKPOINTS, self.path)
        if self.resumed:
            self._remote.add(self.resumed)
            best = checkpoints.best_of(self.path / self.resumed) if self.keep_best else ""
            if best not in ("", self.resumed) and checkpoints.fetch(self.store, best, self.path):
                self._remote.add(best)
            log.info(f"the training resumes from {self.resumed} of {self.uri}")
        self.mark_unchanged()
        return super().__enter__()

    def finish(self, seconds: float = LAST_SECONDS) -> None:
        """Upload what remains after the training; UnavailableError if that fails for `seconds`."""
        self.stop()
        deadline = time.monotonic() + seconds
        while True:
            try:
                self._upload_checkpoints()
                return self._upload_files()
            except InputError:  # another attempt would end alike
                raise
            except KfpDdpError as error:
                if time.monotonic() > deadline:
                    raise UnavailableError(
                        f"the training ended, but its last files cannot be uploaded: {error}"
                    ) from None
                log.warning(f"{error}; trying again")
                time.sleep(2)

    def is_ours(self, name: str) -> bool:
        """Return whether ranks write the file; their logs are only uploaded at the end."""
        if name.startswith("launcher.") or name == RunFolder.PROCESS:
            return False
        return self._stopped.is_set() or not name.startswith(f"{RunFolder.LOGS}/")

    def _upload_files(self) -> None:
        self._move_earlier()  # before a file shows that this training has started
        self.upload()

    def _upload_checkpoints(self) -> None:
        """Upload the newest checkpoint, and the best one with keep_best."""
        self._move_earlier()
        paths = self.path.glob(f"{CHECKPOINTS}/step-*[0-9]")
        complete = [path for path in paths if (path / MANIFEST).exists()]
        newest = max(complete, key=step_of, default=None)
        if newest is None:
            return
        best = ""
        with contextlib.suppress(OSError, ValueError):  # the training may have removed it
            best = checkpoints.best_of(newest) if self.keep_best else ""
        names = (self._name(newest), best)
        desired = [path for path in complete if self._name(path) in names]
        missing = [path for path in desired if self._name(path) not in self._remote]
        for path in sorted(missing, key=lambda path: path != newest):
            self._upload_checkpoint(path)
        if missing:
            checkpoints.prune(self.store, CHECKPOINTS, self.keep, best)

    def _upload_checkpoint(self, checkpoint: Path) -> None:
        name = self._name(checkpoint)
        links = self.path / OUTGOING / checkpoint.name
        shutil.rmtree(links, ignore_errors=True)
        links.mkdir(parents=True)
        started = time.monotonic()
        try:
            # Hard links, as the training may remove an old checkpoint during its upload.
            for file in checkpoint.iterdir():
                os.link(file, links / file.name)
            checkpoints.upload(self.store, name, links)
        except FileNotFoundError:
            return
        finally:
            shutil.rmtree(links, ignore_errors=True)
        self._remote.add(name)
        log.info(f"{name} is at {self.uri} ({time.monotonic() - started:.1f} s)")

    def _name(self, checkpoint: Path) -> str:
        return checkpoint.relative_to(self.path).as_posix()

    def _move_earlier(self) -> None:
        """Move earlier checkpoints aside in the bucket, if the training did so locally."""
        with self._moving:
            aside = f"{CHECKPOINTS}.old-"
            if self.resumed not in self._remote:
                return
            if not any(self.path.glob(f"{aside}*/{self.resumed.rpartition('/')[2]}")):
                return
            if not self._earlier:
                taken = {name.partition("/")[0] for name, _ in self.store.list(aside)}
                free = (f"{aside}{number}" for number in itertools.count())
                self._earlier = next(name for name in free if name not in taken)
            checkpoints.move(self.store, CHECKPOINTS, self._earlier, self.path / OUTGOING)
            self._remote.clear()
            log.info(f"earlier checkpoints are in {self.uri}/{self._earlier} now")


class FollowedFolder(RemoteFolder):
    """The folder of a training as its step follows it; the step's own files are uploaded."""

    def __init__(self, uri: str, every: float = EVERY_SECONDS) -> None:
        super().__init__(uri)
        self._metrics_bytes = 0
        self.every(every, self.refresh)
        self.every(every, self.upload)

    def __enter__(self) -> Self:
        self.download(self.names("launcher."))
        (self.path / RunFolder.HEARTBEAT).touch()
        self.refresh()
        return super().__enter__()

    def __exit__(self, *_: object) -> None:
        self.stop()
        with contextlib.suppress(KfpDdpError):
            self.upload()

    def is_ours(self, name: str) -> bool:
        """Return whether the step writes the file."""
        return name.startswith("launcher.")

    def refresh(self) -> None:
        """Download metrics that grew, files of the ranks and new manifests; raise KfpDdpError."""
        sizes = dict(self.store.list(RunFolder.METRICS))
        if (size := sizes.get(RunFolder.METRICS, 0)) != self._metrics_bytes:
            self.download((RunFolder.CONFIG, RunFolder.METRICS))
            self._metrics_bytes = size
        self.download(self.names(f"{RunFolder.RANKS}/"))
        complete = checkpoints.complete(self.store, CHECKPOINTS)
        manifests = [f"{name}/{MANIFEST}" for name in complete]
        self.download(name for name in manifests if not (self.path / name).exists())


@contextlib.contextmanager
def with_local_folders(config: TrainConfig) -> Iterator[TrainConfig]:
    """Yield the configuration with local folders; what is not local is downloaded or uploaded."""
    run_id = config.run_id.partition("/")[0]
    with training_folder(config) as run_dir, local_dataset(config.data, run_dir, run_id) as data:
        folders = {"data": str(data), "output_dir": str(run_dir)}
        if config.stop_when_stale:
            folders["stop_when_stale"] = str(RunFolder(run_dir).heartbeat)
        yield with_local_weights(TrainConfig.create(**{**config.explicit(), **folders}))


def with_local_weights(config: TrainConfig) -> TrainConfig:
    """Return the configuration with local initial weights, downloaded to the run's folder."""
    if not weights_download.is_per_node(config.pretrained):
        return config
    folder = RunFolder(config.output_dir).initial_weights
    weights = weights_download.download(config.pretrained, folder)
    return TrainConfig.create(**{**config.explicit(), "pretrained": str(weights)})


@contextlib.contextmanager
def training_folder(config: TrainConfig) -> Iterator[Path]:
    """Yield the local folder that a training writes to, which a bucket may back."""
    if not is_remote(config.output_dir):
        yield Path(config.output_dir)
        return
    with TrainingFolder(config.output_dir, config.keep_checkpoints, config.keep_best) as folder:
        try:
            yield folder.path
        except BaseException:
            with contextlib.suppress(KfpDdpError):
                folder.finish(LAST_OF_FAILED_SECONDS)
            raise
        folder.finish()


@contextlib.contextmanager
def followed_folder(uri: str) -> Iterator[tuple[Path, Callable[[], None]]]:
    """Yield the local folder of a training that a step follows, and a function to refresh it."""
    if not is_remote(uri):
        yield Path(uri), lambda: None
        return
    with FollowedFolder(uri) as folder:
        yield folder.path, folder.refresh
