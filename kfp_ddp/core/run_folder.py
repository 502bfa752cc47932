"""The folder of a run's task on the work claim, and the names in it that several programs use."""

import hashlib
import json
import re
from pathlib import Path

from kfp_ddp.core.errors import InputError, StorageError

RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
LABEL_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
"""What Kubernetes takes as the value of a label."""
MLFLOW = "mlflow.json"
"""In a training's folder: the run of MLflow that a resume goes on in, and later steps add to."""
WANDB = "wandb.json"
"""There, too: how far Weights & Biases was told."""
VERDICT = "verdict.json"
"""Beside an evaluation: what the gate said of it."""
REPORT = "report.html"
"""There, too: its report."""
EXPORTED = "exported.json"
"""In a run's folder: what was exported of it, and whether it is the champion now."""


class RunFolder:
    """Where what a run writes lies, for those who write and those who read it."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.config = self.path / "config.json"
        """The configuration of the training, with its automatic values filled in."""
        self.metrics = self.path / "metrics.jsonl"
        """One event of the training a line; a folder with it is a run's."""
        self.dataset = self.path / "dataset.jsonl"
        """What the version of the dataset holds, where each reader brings it."""
        self.checkpoints = self.path / "checkpoints"
        self.begun_by = self.path / "begun-by"
        """Who began there under resume=never."""
        self.logs = self.path / "logs"
        """A folder for the output of the ranks and the record of why they failed."""
        self.tensorboard = self.path / "tensorboard"
        self.profile = self.path / "profile"
        self.heartbeat = self.path / "launcher.heartbeat"
        """Touched while the step that follows the job lives."""
        self.process = self.path / "process.json"
        """The process group that trains on this machine."""
        self.ranks = self.path / "ranks"
        """A file for each rank that says how far it is."""
        self.leases = self.path / ".leases"
        """Who uses the folder now; see `kfp_ddp.core.lease`."""
        self.initial_weights = self.path / "launcher.initial-weights"
        """A folder for what a training begins with, where that was brought from an address."""
        self.bundle = self.path / "bundle"

    @property
    def trace_request(self) -> Path:
        """Which rank is to trace its next steps."""
        return self.path / "launcher.trace.json"

    @property
    def traces(self) -> Path:
        """Folder of the traces that were asked for."""
        return self.path / "traces"

    def log_positions(self, job: str) -> Path:
        """How far the logs of a job's pods were printed."""
        return self.path / f"launcher.{job}.places.json"

    def evaluation(self, split: str) -> Path:
        """Folder of the evaluation of a split; that of `val` is the run's own."""
        return self.path / ("evaluation" if split == "val" else f"evaluation-{split}")


def task_title(task_name: str, task_id: str) -> str:
    """A name for a task of a run, which no other task and no other iteration of a loop has.

    Args:
        task_name: Name of the task in the pipeline.
        task_id: What KFP tells iterations of a loop apart by; '' outside of one.

    Returns:
        At most 63 characters, fit for a label and a folder: the name, or name.id; a digest stands
        for what does not fit.
    """
    title = f"{task_name}.{task_id}" if task_id else task_name
    if LABEL_VALUE.fullmatch(title) and "." not in task_name:
        return title
    digest = hashlib.sha256(json.dumps([task_name, task_id]).encode()).hexdigest()[:12]
    slug = re.sub(r"[^A-Za-z0-9_-]+", "-", task_name)[:40].strip("-_")
    return f"{slug}-{digest}".lstrip("-")


def open_run_dir(work_dir: str, run_id: str, task: str) -> Path:
    """The folder of a run's task, `<work_dir>/<run_id>/<task>`, made if need be.

    Args:
        work_dir: Folder on the work claim.
        run_id: Id of the pipeline run.
        task: Its `task_title`: what two tasks of one run write never meets.

    Raises:
        InputError: for a run id or a task that is no plain name.
        StorageError: for a folder that cannot be written.
    """
    check_run_id(run_id)
    if not RUN_ID.fullmatch(task):
        raise InputError(f"task {task!r} cannot name a folder; pass the name of the task")
    run_dir = Path(work_dir) / run_id / task
    try:
        try_to_write(run_dir)
    except OSError as error:
        raise StorageError(
            f"work_dir {work_dir} cannot be written ({error.strerror}); mount the work claim "
            "there, writable for this user, or give another folder"
        ) from error
    return run_dir.resolve()


def check_run_id(run_id: str) -> None:
    """Refuse what could lead out of the folder of all runs.

    Raises:
        InputError: for a run id that is no plain name.
    """
    if not RUN_ID.fullmatch(run_id):
        raise InputError(
            f"run_id {run_id!r} cannot name a folder: it must be 1 to 128 letters, digits, "
            "'.', '_' or '-' and start with a letter or digit; pass the id of the pipeline run"
        )


def try_to_write(folder: Path) -> None:
    """Make a folder if need be, and a file in it for a moment; raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / ".writable"
    probe.touch()
    probe.unlink()
