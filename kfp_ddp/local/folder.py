"""The folder of a local run: its name, its lock, and whether the same command resumes it."""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kfp_ddp.core.errors import InputError, StorageError, writing
from kfp_ddp.core.files import atomic_write, lock
from kfp_ddp.jobs.local import start_time
from kfp_ddp.runs.record import TaskRecord, read_task

RUNS = Path("run-output")
"""Folder of the runs without --output."""
DATA, LATEST = "data", "latest"
"""In that folder: the dataset versions that its runs share, and a link to the newest run."""
RECORD, LOCK = "run.json", ".lock"
_FORMAT = "kfp-ddp local run 1"
"""In each record; a file of this name without it is of another program."""
DELETED = ("work", "artifacts", "cache", "bundle")
"""Folders of a run that it deletes, or the next one in its folder."""
ENDING_SECONDS = 60.0
"""How long processes of a killed command may take to end."""


@dataclass(frozen=True)
class LocalStep:
    """A step that has started; of a loop, an iteration that failed, else the newest one."""

    name: str
    state: str
    """RUNNING, SUCCEEDED or FAILED."""
    start: float
    """Seconds since 1970, as the end is."""
    end: float = 0.0
    """0 before it."""


@dataclass(frozen=True)
class LocalRun:
    """A run on this machine: what `run.json` of its folder records, and where it writes."""

    identity: str
    """Digest of pipeline, source and requested settings; equal for the same command."""
    arguments: Mapping[str, Any]
    """Arguments of the pipeline, with those that were chosen for this machine."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables of the steps."""
    seed: str = field(default_factory=lambda: secrets.token_hex(8))
    """Seed of kfp.local's ids: the same one in each attempt, as ids name folders."""
    complete: bool = False
    """Whether there is nothing to resume."""
    steps: tuple[LocalStep, ...] = ()
    """Of the last attempt, as are state and times."""
    state: str = ""
    """SUCCEEDED or FAILED; '' without an end of the pipeline."""
    start: float = 0.0
    end: float = 0.0
    deletes: tuple[str, ...] = DELETED
    """Names of what belongs to the run in its folder, and to nobody else."""
    folder: Path = Path()
    data: Path = Path()
    """Folder of the dataset versions."""

    def write(self) -> None:
        """Write the record; settings may contain secrets, so only this user may read it."""
        fields = dataclasses.asdict(self)
        with atomic_write(self.folder / RECORD) as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(json.dumps({"format": _FORMAT, **fields, "folder": "", "data": ""}).encode())

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
            total = record.progress.total
            return f"step {record.checkpoint}{f' of {total}' if total else ''}"
        return ""

    def version(self) -> str:
        """Return the first digits of the digest of the dataset version that was trained on."""
        return next((Path(one.settings["data"]).name for one in self.trainings()), "")


def identity_of(**what: Any) -> str:
    """Return the digest of a command."""
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()


def unfinished(output: Path | None, identity: str) -> LocalRun | None:
    """Return the newest run of the same command, in `output` or `RUNS`, unless it completed."""
    folders = [output] if output else list(RUNS.resolve().glob("*"))
    records = (read_local_run(folder) for folder in folders if not folder.is_symlink())
    runs = [run for run in records if run and run.identity == identity]
    newest = max(runs, key=lambda run: (run.folder / RECORD).stat().st_mtime_ns, default=None)
    if newest is None or newest.complete:
        return None
    return dataclasses.replace(newest, data=_data(newest.folder, output))


def read_local_run(folder: Path) -> LocalRun | None:
    """Return the run that a folder records; None for any other folder."""
    try:
        fields = json.loads((folder / RECORD).read_text())
        if fields.pop("format") != _FORMAT:
            return None
        steps = tuple(LocalStep(**step) for step in fields.pop("steps", ()))
        deletes = tuple(fields.pop("deletes"))
        run = LocalRun(**{**fields, "folder": folder, "steps": steps, "deletes": deletes})
        return dataclasses.replace(run, state=run.state or ("SUCCEEDED" if run.complete else ""))
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return None


def _data(folder: Path, output: Path | None) -> Path:
    return folder / DATA if output else folder.parent / DATA


def begin(run: LocalRun, output: Path | None, name: str, replace: bool = False) -> LocalRun:
    """Create the folder of a new run, or empty that of an earlier one, and return the run with it.

    Synced data and earlier results stay until the new ones are complete. Without `replace`, a model
    of an earlier run in `output` is an InputError, as are files of another origin.
    """
    base = RUNS.resolve()
    with writing(output or base, "choose another folder with --output"):
        if output is None:
            (base / DATA).mkdir(parents=True, exist_ok=True)
            folder = _new_folder(base, name)
        else:
            folder = output
            folder.mkdir(parents=True, exist_ok=True)
            _check_free(folder, replace)
        with locked(folder):
            shutil.rmtree(folder / "work", ignore_errors=True)
            run = dataclasses.replace(run, folder=folder, data=_data(folder, output))
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
    earlier, names = read_local_run(folder), {path.name for path in folder.iterdir()} - {LOCK}
    foreign = names if earlier is None else names & {*DELETED} - {*earlier.deletes}
    if foreign:
        raise InputError(
            f"{folder} holds {min(foreign)}, which is not of a run and might be deleted; "
            "name a new or an empty folder with --output"
        )
    has_model = (folder / "bundle").is_dir() or LocalRun("", {}, folder=folder).trainings()
    if has_model and not replace:
        raise InputError(
            f"{folder} holds the model of an earlier run; name a new folder with --output, or "
            "delete that model with --replace"
        )


def link_latest(run: LocalRun) -> None:
    """Let `latest`, next to a run below `RUNS`, lead to it."""
    link = run.folder.parent / LATEST
    if run.data.parent != run.folder.parent:
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
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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
