"""Mount points of the PVCs, and the forms that a folder's URI can have."""

import os
from urllib.parse import unquote

from kfp_ddp.core.errors import InputError

DATA_VARIABLE = "KFP_DDP_DATA_DIR"
WORK_VARIABLE = "KFP_DDP_WORK_DIR"
SCRATCH_VARIABLE = "KFP_DDP_SCRATCH_DIR"
SCRATCH = "/scratch"
"""Mount point of the emptyDir of steps and workers without a PVC."""
PER_NODE = "each-node:"
"""Prefix of a dataset that each node syncs to its own folder."""


def data_dir(setting: str = "") -> str:
    """Return the folder of the data PVC: the setting, else KFP_DDP_DATA_DIR, else /data."""
    return setting or os.environ.get(DATA_VARIABLE) or "/data"


def work_dir(setting: str = "") -> str:
    """Return the folder or URI of runs: the setting, else KFP_DDP_WORK_DIR, else /work."""
    return setting or os.environ.get(WORK_VARIABLE) or "/work"


def scratch_dir() -> str:
    """Return a folder that is deleted with the pod: the variable's, /scratch or a temporary."""
    import tempfile  # a sync starts without it

    mounted = SCRATCH if os.path.isdir(SCRATCH) else ""
    return os.environ.get(SCRATCH_VARIABLE) or mounted or f"{tempfile.gettempdir()}/kfp-ddp"


def path_of(uri: str) -> str:
    """Return the path in a file URI, another text unchanged; raises InputError for a host."""
    if not uri.startswith("file://"):
        return uri
    host, slash, below = uri.removeprefix("file://").partition("/")
    if host not in ("", "localhost") or not slash:
        host = host.rpartition("@")[2]
        raise InputError(f"file://{host} is not a file URI: write file:///folder, three slashes")
    return unquote(slash + below)


def is_remote(folder: str) -> bool:
    """Return whether the folder is a URI such as gs://bucket/prefix, not a path."""
    return "://" in folder


def is_relative(path: str) -> bool:
    """Return whether a path is below another folder, such as that of the dataset."""
    return not is_remote(path) and not path.startswith("/")


def is_per_node(dataset: str) -> bool:
    """Return whether each node syncs this dataset itself; False for a folder."""
    return dataset.startswith(PER_NODE)
