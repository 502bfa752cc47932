"""Where a run's folder is: a path on a claim, or an address below a bucket's prefix."""

import shutil
from pathlib import Path

from kfp_ddp.core import folders
from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.core.run_folder import RUN_ID, check_run_id


def run_address(work: str, run_id: str, task: str) -> str:
    """The address of a run's task, `<work>/<run_id>/<task>`; raises InputError for other names."""
    check_run_id(run_id)
    if not RUN_ID.fullmatch(task):
        raise InputError(f"task {task!r} cannot name a folder; pass the name of the task")
    return f"{work.rstrip('/')}/{run_id}/{task}"


def local_folder(address: str) -> Path:
    """A new folder for what lies at an address; the same on each pod of a job.

    What an earlier process left there is removed: the bucket alone counts.

    Raises:
        StorageError: it cannot be made.
    """
    folder = Path(folders.scratch_dir(), "runs", *address.split("/")[-2:])
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    except OSError as error:
        raise StorageError(
            f"{folder} cannot be written ({error.strerror}): mount an emptyDir there, or name "
            f"another folder by {folders.SCRATCH_VARIABLE}"
        ) from None
    return folder
