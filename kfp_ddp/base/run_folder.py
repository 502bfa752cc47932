"""The folder of a run on the work claim."""

import re
from pathlib import Path

from kfp_ddp.base.errors import InputError

RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def open_run_dir(work_dir: str, run_id: str) -> Path:
    """The folder of a run, made if need be.

    Raises:
        InputError: for a run id that is no plain name, or a folder that cannot be written.
    """
    if not RUN_ID.fullmatch(run_id):
        raise InputError(
            f"run_id {run_id!r} cannot name a folder: it must be 1 to 128 letters, digits, "
            "'.', '_' or '-' and start with a letter or digit; pass the id of the pipeline run"
        )
    run_dir = Path(work_dir) / run_id
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        probe = run_dir / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InputError(
            f"work_dir {work_dir} cannot be written ({error.strerror}); mount the work claim "
            "there, writable for this user, or give another folder"
        ) from error
    return run_dir.resolve()
