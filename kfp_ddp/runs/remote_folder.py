"""A run's folder in a bucket, with a copy of it on this machine."""

import filecmp
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Self

from kfp_ddp.core import folders
from kfp_ddp.core.errors import KfpDdpError, StorageError
from kfp_ddp.runs import checkpoints
from kfp_ddp.storage.kinds import open_store
from kfp_ddp.storage.store import Store

OUTGOING = ".outgoing"
_LARGEST = 1 << 40


class RemoteFolder:
    """A folder in a bucket and its local copy; a context in which periodic tasks run.

    Subclasses say by `is_ours` which local files belong in the bucket, and add tasks by `every`.
    Hidden files, links and checkpoints are never uploaded by `upload`.
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
        """Add a task that runs each `seconds` in a thread while the context is open.

        It continues after errors of the bucket.
        """
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
                    print(f"warning: {error}; trying again", flush=True)
                failing = True
            else:
                if failing:
                    print(f"{self.uri} can be reached again", flush=True)
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
        """Upload changed files, oldest first, so that a marker of completeness comes last.

        After a KfpDdpError the next call resumes.
        """
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
        """Delete files from the bucket that were removed locally; raises KfpDdpError."""
        for name in self._uploaded.keys() - {name for name, _ in self._files()}:
            self.store.delete(name)
            del self._uploaded[name]

    def _files(self) -> Iterator[tuple[str, tuple[int, int]]]:
        for at, subfolders, files in os.walk(self.path):
            subfolders[:] = [name for name in subfolders if not name.startswith(".")]
            for path in (Path(at, file) for file in files if not file.startswith(".")):
                name = path.relative_to(self.path).as_posix()
                if checkpoints.contains(name) or not self.is_ours(name) or path.is_symlink():
                    continue
                try:
                    about = path.stat()
                except FileNotFoundError:
                    continue
                yield name, (about.st_mtime_ns, about.st_size)


def fetch(store: Store, names: Iterable[str], folder: Path) -> None:
    """Download files to a folder atomically; a file with the same content is not touched.

    KfpDdpError if they cannot be read, OSError if this machine has no space.
    """
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.incoming")
        with aside.open("w+b") as into:
            exists = store.fetch(name, into, _LARGEST)
        if exists and not (path.exists() and filecmp.cmp(aside, path, shallow=False)):
            os.replace(aside, path)
        else:
            aside.unlink()


def is_plain(name: str) -> bool:
    """Return whether a listed name can be a file of a run: no hidden part, no `..`."""
    return all(part and not part.startswith(".") for part in name.split("/"))


def local_folder(uri: str) -> Path:
    """Create an empty folder for the copy of a URI; its path is the same on each pod of a job."""
    folder = Path(folders.scratch_dir(), "runs", *uri.split("/")[-2:])
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    except OSError as error:
        raise StorageError(
            f"{folder} cannot be written ({error.strerror}): mount an emptyDir there, or set "
            f"{folders.SCRATCH_VARIABLE} to another folder"
        ) from None
    return folder
