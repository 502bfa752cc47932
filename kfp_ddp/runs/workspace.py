"""The folder of a run as a step reads and writes it: on a PVC, or a copy of one in a bucket."""

import contextlib
import filecmp
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Self

from kfp_ddp.core.errors import InputError, KfpDdpError, writing
from kfp_ddp.core.folders import SCRATCH_VARIABLE, is_remote, make_own, scratch_dir
from kfp_ddp.core.log import log
from kfp_ddp.core.run_folder import open_run_dir, task_folder
from kfp_ddp.datasets.names import reason_unsafe
from kfp_ddp.runs import checkpoints
from kfp_ddp.storage import leases
from kfp_ddp.storage.kinds import open_store
from kfp_ddp.storage.store import Store

OUTGOING = ".outgoing"
_LARGEST = 1 << 40
MORE_STORAGE = "give the pod more ephemeral storage"


class RemoteFolder:
    """A folder in a bucket and its local copy; a context in which periodic tasks run.

    `upload` never uploads hidden files, links and checkpoints, nor what is not `is_ours`.
    """

    def __init__(self, uri: str, path: Path | None = None) -> None:
        self.uri = uri.rstrip("/")
        self.path = path or local_folder(self.uri)
        self._thread = threading.local()
        self._tasks: list[threading.Thread] = []
        self._stopped = threading.Event()
        self._uploaded: dict[str, tuple[int, int]] = {}
        """Time and size of each file when it was last uploaded or downloaded."""

    def __enter__(self) -> Self:
        for task in self._tasks:
            task.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def store(self) -> Store:
        """Return the bucket; each thread has its own connection."""
        if not hasattr(self._thread, "store"):
            self._thread.store = open_store(self.uri)
        store: Store = self._thread.store
        return store

    def every(self, seconds: float, act: Callable[[], None]) -> None:
        """Add a task that a thread runs each `seconds`, also after errors of the bucket."""
        thread = threading.Thread(target=self._repeat, args=(seconds, act), daemon=True)
        self._tasks.append(thread)

    def stop(self) -> None:
        """Stop the periodic tasks after their current calls."""
        self._stopped.set()
        for task in self._tasks:
            if task.ident is not None:
                task.join()

    def _repeat(self, seconds: float, act: Callable[[], None]) -> None:
        failing = False
        while not self._stopped.wait(seconds):
            try:
                act()
            except (KfpDdpError, OSError) as error:
                if not failing:
                    log.warning(f"{error}; trying again")
                failing = True
            else:
                if failing:
                    log.info(f"{self.uri} can be reached again")
                failing = False

    def is_ours(self, name: str) -> bool:
        """Return whether this process uploads the file."""
        return True

    def names(self, prefix: str = "") -> list[str]:
        """Return the names in the bucket that start with `prefix` and can be files of a run."""
        return [name for name, _ in self.store.list(prefix) if is_plain(name)]

    def download(self, names: Iterable[str]) -> None:
        """Download files; see `fetch`."""
        fetch(self.store, names, self.path)

    def mark_unchanged(self, below: str = "") -> None:
        """Note that the bucket has the local files whose names start with `below`."""
        self._uploaded |= {name: stamp for name, stamp in self._files() if name.startswith(below)}

    def upload(self) -> None:
        """Upload changed files, oldest first: a marker of completeness last; a new call resumes."""
        changed = [item for item in self._files() if self._uploaded.get(item[0]) != item[1]]
        aside = self.path / OUTGOING / "file"
        aside.parent.mkdir(exist_ok=True)
        for name, stamp in sorted(changed, key=lambda item: item[1]):
            try:
                shutil.copyfile(self.path / name, aside)  # the file may grow during the upload
            except FileNotFoundError:
                continue
            self.store.put(aside, name)
            self._uploaded[name] = stamp

    def delete_removed(self) -> None:
        """Delete files from the bucket that were removed locally; raise KfpDdpError."""
        for name in self._uploaded.keys() - {name for name, _ in self._files()}:
            self.store.delete(name)
            del self._uploaded[name]

    def _files(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """Yield name, and time and size, of the files to upload."""
        for path in self._plain_files():
            name = path.relative_to(self.path).as_posix()
            is_checkpoint = checkpoints.contains(name)  # uploaded as a whole
            if is_checkpoint or not self.is_ours(name):
                continue
            try:
                about = path.stat()
            except FileNotFoundError:
                continue
            yield name, (about.st_mtime_ns, about.st_size)

    def _plain_files(self) -> Iterator[Path]:
        """Yield the files that are neither hidden, nor below a hidden folder, nor links."""
        for folder, subfolders, files in os.walk(self.path):
            subfolders[:] = filter(_is_visible, subfolders)
            paths = (Path(folder, name) for name in filter(_is_visible, files))
            yield from (path for path in paths if not path.is_symlink())


def _is_visible(name: str) -> bool:
    return not name.startswith(".")


def fetch(store: Store, names: Iterable[str], folder: Path) -> None:
    """Download changed files to a folder atomically; KfpDdpError, OSError without local space."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.incoming")
        with aside.open("w+b") as into:
            exists = store.fetch(name, into, _LARGEST)
        # A file that did not change keeps its time, by which it would be uploaded again.
        is_same = path.exists() and filecmp.cmp(aside, path, shallow=False)
        if exists and not is_same:
            os.replace(aside, path)
        else:
            aside.unlink()


def is_plain(name: str) -> bool:
    """Return whether a listed name can be a file of a run: neither hidden nor refused by a sync."""
    parts = name.split("/")
    if not parts[-1] or not all(map(_is_visible, parts)):
        return False
    return not reason_unsafe(name)


def local_folder(uri: str) -> Path:
    """Create an empty folder for the copy of a URI; its path is the same on each pod of a job."""
    runs = scratch_dir() / "runs"
    folder = Path(runs, *uri.split("/")[-2:])
    with writing(folder, f"mount an emptyDir there, or set {SCRATCH_VARIABLE} to another folder"):
        make_own(runs)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    return folder


class RunWorkspace:
    """A run's folder; `path` is local."""

    def __init__(self, path: Path, remote: RemoteFolder | None = None) -> None:
        self.path = path
        self._remote = remote

    def download(self, uri: str) -> Path:
        """Return the local path of a folder of the run, downloaded; InputError if incomplete."""
        if self._remote is None or not is_remote(uri):
            return Path(uri)
        if not f"{uri}/".startswith(f"{self._remote.uri}/"):
            raise InputError(f"{uri} is not of the run {self._remote.uri}: give both of one run")
        name = uri.rstrip("/")[len(self._remote.uri) + 1 :]
        with writing(self.path, MORE_STORAGE):
            if not checkpoints.contains(f"{name}/file"):
                self.download_below(f"{name}/" if name else "")
            elif not checkpoints.fetch(self._remote.store, name, self.path):
                raise InputError(
                    f"{uri} is not a complete checkpoint: give the one that train returned"
                )
        return self.path / name

    def download_file(self, uri: str) -> Path:
        """Return the local path of a file; the other files of its folder are downloaded, too."""
        folder, _, name = uri.rpartition("/")
        return self.download(folder) / name if is_remote(uri) else Path(uri)

    def to_uri(self, path: Path) -> str:
        """Return what other steps call a file of this folder."""
        if self._remote is None:
            return str(path)
        return f"{self._remote.uri}/{path.relative_to(self.path).as_posix()}"

    def download_below(self, prefix: str, deep: bool = True) -> None:
        """Download files whose names start with `prefix`; with `deep` also from subfolders."""
        if self._remote is None:
            return
        names = self._remote.names(prefix)
        if not deep:
            names = [name for name in names if "/" not in name]
        self._remote.download(name for name in names if not name.startswith("launcher."))
        self._remote.mark_unchanged(prefix)

    def upload(self) -> None:
        """Upload files that were written and delete those that were removed."""
        if self._remote is not None:
            with writing(self.path, MORE_STORAGE):
                self._remote.delete_removed()
                self._remote.upload()


def create_run_folder(work: str, run_id: str, task: str) -> str:
    """Return the path or URI of a run's task, by its `task_title`; raises if it is not writable."""
    if not is_remote(work):
        return str(open_run_dir(work, run_id, task))
    uri = task_folder(work, run_id, task)
    leases.mark_begin(open_store(uri))
    return uri


@contextlib.contextmanager
def open_workspace(run_dir: str, holder: str) -> Iterator[RunWorkspace]:
    """Yield a leased run's folder with its top-level files; changes are uploaded at the end."""
    if not is_remote(run_dir):
        yield RunWorkspace(Path(run_dir))
        return
    path = local_folder(f"{run_dir.rstrip('/')}/{holder}.{os.getpid()}")
    workspace = RunWorkspace(path, RemoteFolder(run_dir, path))
    try:
        with leases.bucket_lease(run_dir, holder):
            with writing(path, MORE_STORAGE):
                workspace.download_below("", deep=False)
            yield workspace
            workspace.upload()
    finally:
        shutil.rmtree(path, ignore_errors=True)
