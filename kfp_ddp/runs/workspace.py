"""The folder of a run as a step reads and writes it: on a PVC, or a copy of one in a bucket."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.core.folders import is_remote
from kfp_ddp.core.run_folder import RUN_ID, check_run_id, open_run_dir
from kfp_ddp.runs import checkpoints
from kfp_ddp.runs.remote_folder import RemoteFolder, local_folder
from kfp_ddp.storage import leases
from kfp_ddp.storage.kinds import open_store


class RunWorkspace:
    """A run's folder; `path` is local."""

    def __init__(self, path: Path, remote: RemoteFolder | None = None) -> None:
        self.path, self._remote = path, remote

    def download(self, uri: str) -> Path:
        """Return the local path of a folder of the run; from a bucket it is downloaded.

        InputError if it is not below the run's folder, or is an incomplete checkpoint.
        """
        if self._remote is None or not is_remote(uri):
            return Path(uri)
        if not f"{uri}/".startswith(f"{self._remote.uri}/"):
            raise InputError(f"{uri} is not of the run {self._remote.uri}: give both of one run")
        name = uri.rstrip("/")[len(self._remote.uri) + 1 :]
        with _enough_space(self.path, uri):
            if checkpoints.contains(f"{name}/file"):
                if not checkpoints.fetch(self._remote.store, name, self.path):
                    raise InputError(
                        f"{uri} is not a complete checkpoint: give the one that train returned"
                    )
            else:
                self.download_below(f"{name}/" if name else "")
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
        if self._remote is not None:
            names = [n for n in self._remote.names(prefix) if deep or "/" not in n]
            self._remote.download(n for n in names if not n.startswith("launcher."))
            self._remote.mark_unchanged(prefix)

    def upload(self) -> None:
        """Upload files that were written and delete those that were removed."""
        if self._remote is not None:
            with _enough_space(self.path, self._remote.uri):
                self._remote.delete_removed()
                self._remote.upload()


def create_run_folder(work: str, run_id: str, task: str) -> str:
    """Return the path or URI of a run's task, by its `task_title`; raises if it is not writable."""
    if not is_remote(work):
        return str(open_run_dir(work, run_id, task))
    check_run_id(run_id)
    if not RUN_ID.fullmatch(task):
        raise InputError(f"task {task!r} cannot name a folder; pass the name of the task")
    uri = f"{work.rstrip('/')}/{run_id}/{task}"
    leases.mark_begin(open_store(uri))
    return uri


@contextlib.contextmanager
def open_workspace(run_dir: str, holder: str) -> Iterator[RunWorkspace]:
    """Yield a run's folder with its top-level files; what the block writes is uploaded at its end.

    The folder has a lease of `holder` meanwhile.
    """
    if not is_remote(run_dir):
        yield RunWorkspace(Path(run_dir))
        return
    path = local_folder(f"{run_dir.rstrip('/')}/{holder}.{os.getpid()}")
    workspace = RunWorkspace(path, RemoteFolder(run_dir, path))
    try:
        with leases.bucket_lease(run_dir, holder):
            with _enough_space(path, run_dir):
                workspace.download_below("", deep=False)
            yield workspace
            workspace.upload()
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _enough_space(path: Path, uri: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{path} cannot hold the files of {uri}: {error.strerror or error}; give the pod "
            "more ephemeral storage"
        ) from None
