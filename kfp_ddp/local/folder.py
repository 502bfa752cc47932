"""The folder of a local run: its name, its lock, and whether the same command resumes it.

The folder may be a stranger's, such as a part of a project that was downloaded. So a record counts
only with a seal of this user, and the dataset lies in a folder whose name nobody else can know.
"""

import contextlib
import hashlib
import itertools
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from kfp_ddp.core import ownership
from kfp_ddp.core.errors import InputError, StorageError, writing
from kfp_ddp.core.files import atomic_write, lock, open_lock, read_below
from kfp_ddp.core.settings import Stored, mapping_in
from kfp_ddp.jobs.local import start_time
from kfp_ddp.local.display import say, shown
from kfp_ddp.runs.record import TaskRecord, read_task

RUNS = Path("run-output")
"""Folder of the runs without --output."""
DATA = "data"
"""In that folder, the dataset versions that its runs share."""
LATEST = "latest"
"""In that folder, a link to the newest run."""
RECORD = "run.json"
LOCK = ".lock"
_LARGEST = 1 << 20
"""Bytes of a record."""
_FORMAT: Literal["kfp-ddp local run 1"] = "kfp-ddp local run 1"
"""In each record; a file of this name without it is of another program."""
DELETED = ("work", "artifacts", "cache", "bundle")
"""Folders of a run that it deletes, or the next one in its folder."""
ENDING_SECONDS = 60.0
"""How long processes of a killed command may take to end."""


_Seconds = Annotated[float, Field(ge=0, le=253_402_300_799)]
"""Seconds since 1970, until the year 9999."""
_NAME = 16
"""Digits of the name of the folder with the dataset."""


class LocalStep(Stored):
    """A step that has started; of a loop, an iteration that failed, else the newest one."""

    name: str
    state: Literal["RUNNING", "SUCCEEDED", "FAILED"]
    start: _Seconds
    end: _Seconds = 0.0
    """0 before it."""


class LocalRun(Stored):
    """A run on this machine: what `run.json` of its folder records, and where it writes."""

    identity: str
    """Digest of pipeline, source and requested settings; equal for the same command."""
    settings: str = ""
    """Digest of all arguments, where some are chosen for this machine; a resumed run has them."""
    seed: str = Field(default_factory=lambda: secrets.token_hex(8))
    """Seed of kfp.local's ids: the same one in each attempt, as ids name folders."""
    complete: bool = False
    """Whether there is nothing to resume."""
    steps: tuple[LocalStep, ...] = ()
    """Of the last attempt, as are state and times."""
    state: Literal["", "SUCCEEDED", "FAILED"] = ""
    """Empty without an end of the pipeline."""
    start: _Seconds = 0.0
    end: _Seconds = 0.0
    deletes: tuple[str, ...] = DELETED
    """Names of what belongs to the run in its folder, and to nobody else."""
    format: Literal["kfp-ddp local run 1"] = _FORMAT
    seal: str = ""
    """Of all this, for its folder; empty in records of 0.1.0."""
    folder: Path = Field(Path(), exclude=True)
    data: Path = Field(Path(), exclude=True)
    """Folder of the dataset versions."""

    def replace(self, **fields: Any) -> "LocalRun":
        """Return the run with other values of some fields."""
        return self.model_copy(update=fields)

    def write(self) -> None:
        """Write the record, with its seal, for this user alone."""
        ownership.mark(self.folder)
        sealed = self.replace(seal=ownership.seal(self.folder, self._content(unset=True)))
        with atomic_write(self.folder / RECORD) as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(sealed.model_dump_json().encode())

    def is_own(self) -> bool:
        """Return whether this user's program has written the record, and for this folder."""
        return ownership.is_sealed(self.folder, self._content(unset=False), self.seal)

    def _content(self, unset: bool) -> str:
        """Return what is sealed; the program that wrote a record may not know `unset` fields."""
        return self.model_dump_json(exclude={"seal"}, exclude_unset=not unset)

    def trainings(self) -> list[TaskRecord]:
        """Return the trainings that have a checkpoint."""
        records = map(read_task, self.folder.glob("work/*/*"))
        return [record for record in records if record.checkpoint is not None]

    def progress(self) -> str:
        """Return the newest checkpoint, such as `step 120 of 480`; '' without one."""
        trainings = self.trainings()
        if len(trainings) > 1:
            return f"the newest checkpoints of {len(trainings)} trainings"
        for record in trainings:
            step = f"step {record.checkpoint}"
            total = record.progress.total
            return f"{step} of {total}" if total else step
        return ""

    def version(self) -> str:
        """Return the first digits of the digest of the dataset version that was trained on."""
        return next((Path(training.settings["data"]).name for training in self.trainings()), "")


def identity_of(**what: Any) -> str:
    """Return the digest of a command."""
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()


def unfinished(output: Path | None, identity: str) -> LocalRun | None:
    """Return this user's newest run of the same command, in `output` or `RUNS`, to resume it."""
    folders = [output] if output else list(RUNS.resolve().glob("*"))
    own = []
    for folder in folders:
        run = None if folder.is_symlink() else read_local_run(folder)
        if run is None or run.identity != identity:
            continue
        if run.is_own():
            own.append(run)
        elif output is None and not run.complete:
            say(
                f"note: the run of this command in {shown(run.folder)} is not resumed: it is of "
                "0.1.0, copied, or not this user's (another key)"
            )
    newest = max(own, key=lambda run: (run.folder / RECORD).stat().st_mtime_ns, default=None)
    if newest is None or newest.complete:
        return None
    return newest.replace(data=data_of(output or newest.folder.parent))


def read_local_run(folder: Path) -> LocalRun | None:
    """Return the run that a folder records, of whatever user; None for any other folder."""
    try:
        fields = mapping_in(read_below(folder, RECORD, _LARGEST))
        fields |= {"format": fields.get("format", ""), "folder": folder, "data": Path()}
        return LocalRun.model_validate(fields)
    except (OSError, ValueError, InputError):
        return None


def data_of(base: Path) -> Path:
    """Return the folder of the dataset versions below one of a run, or of `RUNS`.

    Only this user's key gives its name, so nothing that others put there is taken for a version.
    """
    return base / DATA / ownership.seal(base, DATA)[:_NAME]


def begin(run: LocalRun, output: Path | None, name: str, replace: bool = False) -> LocalRun:
    """Create the folder of a new run, or empty that of an earlier one, and return the run with it.

    Synced data and earlier results stay until the new ones are complete. Without `replace`, a model
    of an earlier run in `output` is an InputError, as are files of another origin.
    """
    base = RUNS.resolve()
    with writing(output or base, "choose another folder with --output"):
        if output is None:
            base.mkdir(parents=True, exist_ok=True)
            ownership.mark(base)
            folder = _new_folder(base, name)
        else:
            folder = output
            folder.mkdir(parents=True, exist_ok=True)
            _check_free(folder, replace)
        with locked(folder):
            shutil.rmtree(folder / "work", ignore_errors=True)
            ownership.mark(folder)
            run = run.replace(folder=folder, data=data_of(output or base))
            run.write()
    return run


def _new_folder(base: Path, name: str) -> Path:
    """Create and return `name` below the base, or the first of name-2, name-3 … that is free."""
    for number in itertools.count(1):
        folder = base / (name if number == 1 else f"{name}-{number}")
        with contextlib.suppress(FileExistsError):
            if folder.name != LATEST:
                folder.mkdir()
                return folder
    raise AssertionError


def _check_free(folder: Path, replace: bool) -> None:
    """Raise InputError if a folder has something that a new run would delete, and not its own."""
    foreign = {path.name for path in folder.iterdir()} - {LOCK, ownership.MARK}
    earlier = read_local_run(folder)
    if earlier and earlier.is_own():
        foreign &= {*DELETED} - {*earlier.deletes}
    if foreign:
        raise InputError(
            f"{folder} holds {min(foreign)}, which is not of a run of this user and this version, "
            "and might be deleted; name a new or an empty folder with --output"
        )
    has_model = (folder / "bundle").is_dir() or LocalRun(identity="", folder=folder).trainings()
    if has_model and not replace:
        raise InputError(
            f"{folder} holds the model of an earlier run; name a new folder with --output, or "
            "delete that model with --replace"
        )


def link_latest(run: LocalRun) -> None:
    """Let `latest`, next to a run below `RUNS`, lead to it."""
    link = run.folder.parent / LATEST
    if run.data.parents[1] != run.folder.parent:
        return
    with contextlib.suppress(OSError):  # a file system without links
        aside = link.with_name(f".{run.seed}")
        aside.symlink_to(run.folder.name)
        aside.replace(link)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Lock a run's folder and yield the descriptor; a child that gets it has the lock, too.

    This waits until all processes of a killed command have ended.
    Raise InputError if another command that runs has it; StorageError if the processes do not end.
    """
    descriptor = open_lock(folder / LOCK, 0o600)
    try:
        deadline = time.monotonic() + ENDING_SECONDS
        while not lock(descriptor, folder):
            pid, _, started = os.pread(descriptor, 200, 0).decode().partition(" ")
            if pid.isdecimal() and start_time(int(pid)) == started:
                raise InputError(
                    f"process {pid} is running in {folder}: wait for it, or start another run "
                    "with --output"
                )
            if time.monotonic() > deadline:
                raise StorageError(
                    f"processes of a killed run do not end in {folder}: end them, or name another "
                    "folder with --output"
                )
            time.sleep(0.1)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()} {start_time(os.getpid())}".encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)


def is_running(folder: Path) -> bool:
    """Return whether a command works in the folder of a run."""
    try:
        with open(folder / LOCK, "rb+") as file:  # NFS locks only what can be written
            return not lock(file.fileno(), folder)
    except (OSError, StorageError):
        return False
