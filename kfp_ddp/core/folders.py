"""Mount points of the PVCs, and the forms that a folder's URI can have."""

import contextlib
import functools
import os
import re
import stat
from pathlib import Path
from urllib.parse import unquote

from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.core.files import closing_descriptor

DATA_VARIABLE = "KFP_DDP_DATA_DIR"
WORK_VARIABLE = "KFP_DDP_WORK_DIR"
SCRATCH_VARIABLE = "KFP_DDP_SCRATCH_DIR"
SCRATCH = "/scratch"
"""Mount point of the emptyDir of steps and workers without a PVC."""
_SCRATCH_OF_PROCESS = "kfp-ddp-scratch-"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_BY_OTHERS = 0o022
_POD = frozenset({"KFP_POD_NAME", "KUBERNETES_SERVICE_HOST"})
"""Variables that steps, and all pods, have."""
PER_NODE = "each-node:"
"""Prefix of a dataset that each node syncs to its own folder."""


def data_dir(setting: str = "") -> str:
    """Return the folder of the data PVC: the setting, else KFP_DDP_DATA_DIR, else /data."""
    return setting or os.environ.get(DATA_VARIABLE) or "/data"


def work_dir(setting: str = "") -> str:
    """Return the folder or URI of runs: the setting, else KFP_DDP_WORK_DIR, else /work."""
    return setting or os.environ.get(WORK_VARIABLE) or "/work"


def scratch_dir() -> Path:
    """Return a folder for working files: the variable's, or in a pod one that ends with it.

    Elsewhere it is new, of this user alone, and this process removes it at its end. Raise
    StorageError if the variable names a folder, outside of a pod, that others can write to.
    """
    named = os.environ.get(SCRATCH_VARIABLE, "")
    if _POD.isdisjoint(os.environ):
        if not named:
            return _scratch_of(os.getpid())
        make_own(Path(named))
    if named:
        return Path(named)
    if os.path.isdir(SCRATCH):
        return Path(SCRATCH)
    return Path(_temporary_dir(), "kfp-ddp")


@functools.cache
def _scratch_of(process: int) -> Path:
    """Return a new folder for this process; remove those whose processes were killed."""
    import atexit
    import fcntl
    import shutil
    import tempfile

    for left in Path(_temporary_dir()).glob(f"{_SCRATCH_OF_PROCESS}*"):
        unless_in_use = contextlib.suppress(OSError)  # or removed meanwhile, or of another user
        with unless_in_use, closing_descriptor(os.open(left, _FOLDER)) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_own(left):
                shutil.rmtree(left, ignore_errors=True)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_SCRATCH_OF_PROCESS))
        with contextlib.suppress(OSError):
            # Locked until this process ends; another one may have removed it before that.
            fcntl.flock(os.open(folder, _FOLDER), fcntl.LOCK_EX | fcntl.LOCK_NB)
            if folder.is_dir():
                atexit.register(shutil.rmtree, folder, ignore_errors=True)
                return folder


def _temporary_dir() -> str:
    import tempfile  # a sync starts without it

    return tempfile.gettempdir()


def is_own(folder: Path) -> bool:
    """Return whether a folder, no link, is this user's and no other can write; raise OSError."""
    about = folder.lstat()
    own = stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid()
    return own and not about.st_mode & _BY_OTHERS


def make_own(folder: Path) -> None:
    """Create a folder of this user alone; raise StorageError for one that others can write to."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_own(folder):
        raise StorageError(
            f"the folder {folder} is writable by other users: remove it, or set {SCRATCH_VARIABLE} "
            "to another folder"
        )


def path_of(uri: str) -> str:
    """Return the path in a file URI, another text unchanged; raise InputError for a host."""
    if not uri.startswith("file://"):
        return uri
    host, slash, below = uri.removeprefix("file://").partition("/")
    if host not in ("", "localhost") or not slash:
        host = host.rpartition("@")[2]
        raise InputError(f"file://{host} is not a file URI: write file:///folder, three slashes")
    return unquote(slash + below)


def with_home(text: str) -> str:
    """Return a path that a user wrote, with the home for ~ alone: ~x may be a folder."""
    home = os.path.expanduser("~")
    return re.sub(r"^~(?=/|$)", lambda _: home, text)


def place_of(text: str, base: str = "") -> str:
    """Return where a user's path is on this machine: ~ is the home, others are in a folder `base`.

    '' for an address, and for a word that names nothing there.
    """
    path = with_home(text)
    if base:
        path = os.path.normpath(os.path.join(base, path))
    is_path = text.startswith((".", "~")) or os.path.exists(path)
    return path if is_path else ""


def is_remote(folder: str) -> bool:
    """Return whether the folder is a URI such as gs://bucket/prefix, not a path."""
    return "://" in folder


def is_relative(path: str) -> bool:
    """Return whether a path is below another folder, such as that of the dataset."""
    return not is_remote(path) and not path.startswith("/")


def is_per_node(dataset: str) -> bool:
    """Return whether each node syncs this dataset itself; False for a folder."""
    return dataset.startswith(PER_NODE)
