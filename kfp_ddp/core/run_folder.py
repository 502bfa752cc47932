"""A run's folder on the work PVC: paths and names."""

import re
from pathlib import Path

from kfp_ddp.core.errors import InputError, writing
from kfp_ddp.core.files import sha256_of_json

RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
LABEL_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
"""Pattern of a label's value in Kubernetes."""
MLFLOW = "mlflow.json"
"""In a training's folder: the run of MLflow that a resume and later steps write to."""
VERDICT = "verdict.json"
"""Beside an evaluation: the gate's decision."""
REPORT = "report.html"
"""Beside an evaluation: its report."""
LABELS_TO_CHECK = "labels_to_check.csv"
"""Beside an evaluation: images whose label is doubtful."""
EXPORTED = "exported.json"
"""In a run's folder: the exported version, and whether it is the champion."""


class RunFolder:
    """Paths of the files in a run's folder."""

    CONFIG = "config.json"
    METRICS = "metrics.jsonl"
    CHECKPOINTS = "checkpoints"
    LOGS = "logs"
    TENSORBOARD = "tensorboard"
    HEARTBEAT = "launcher.heartbeat"
    PROCESS = "process.json"
    RANKS = "ranks"
    BUNDLE = "bundle"

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.config = self.path / self.CONFIG
        """Configuration of the training, with its automatic values."""
        self.metrics = self.path / self.METRICS
        """An event of the training per line; every run's folder has this file."""
        self.dataset = self.path / "dataset.jsonl"
        """Content of the dataset's version, if each node syncs it."""
        self.checkpoints = self.path / self.CHECKPOINTS
        self.begun_by = self.path / "begun-by"
        """Id of the run that started the training with resume=never."""
        self.logs = self.path / self.LOGS
        """Folder of the ranks' output and failures."""
        self.tensorboard = self.path / self.TENSORBOARD
        self.profile = self.path / "profile"
        self.heartbeat = self.path / self.HEARTBEAT
        """Touched as long as the step that watches the job runs."""
        self.process = self.path / self.PROCESS
        """Process group of a local training."""
        self.ranks = self.path / self.RANKS
        """Folder with the progress of each rank."""
        self.leases = self.path / ".leases"
        """Leases of the folder's users; see `kfp_ddp.storage.leases`."""
        self.initial_weights = self.path / "launcher.initial-weights"
        """Folder of initial weights that were downloaded."""

    def log_positions(self, job: str) -> Path:
        """Return the file with the log positions of a job's pods."""
        return self.path / f"launcher.{job}.places.json"

    def evaluation(self, split: str) -> Path:
        """Return the folder of the evaluation of a split."""
        return self.path / self.evaluation_name(split)

    @staticmethod
    def evaluation_name(split: str) -> str:
        """Return the folder's name: `evaluation` for the split `val`, else with the split's."""
        return "evaluation" if split == "val" else f"evaluation-{split}"


def task_title(task_name: str, task_id: str) -> str:
    """Return a name that is unique among the tasks and iterations of a run, as label or folder."""
    title = f"{task_name}.{task_id}" if task_id else task_name
    if LABEL_VALUE.fullmatch(title) and "." not in task_name:
        return title
    digest = sha256_of_json([task_name, task_id])[:12]
    slug = re.sub(r"[^A-Za-z0-9_-]+", "-", task_name)[:40].strip("-_")
    return f"{slug}-{digest}".lstrip("-")


def open_run_dir(work_dir: str, run_id: str, task: str) -> Path:
    """Create and return the folder of a run's task; raise as `task_folder`, and StorageError."""
    run_dir = Path(task_folder(work_dir, run_id, task))
    advice = f"mount the work PVC at {work_dir}, writable for this user, or give another folder"
    with writing(run_dir, advice):
        try_to_write(run_dir)
    return run_dir.resolve()


def task_folder(work_dir: str, run_id: str, task: str) -> str:
    """Return `<work_dir>/<run_id>/<task>`, a path or a URI; raise InputError for other names."""
    check_run_id(run_id)
    if not RUN_ID.fullmatch(task):
        raise InputError(f"task {task!r} cannot name a folder; pass the name of the task")
    return f"{work_dir.rstrip('/')}/{run_id}/{task}"


def check_run_id(run_id: str) -> None:
    """Raise InputError unless a run id is a plain name."""
    if not RUN_ID.fullmatch(run_id):
        raise InputError(
            f"run_id {run_id!r} cannot name a folder: it must be 1 to 128 letters, digits, "
            "'.', '_' or '-' and start with a letter or digit; pass the id of the pipeline run"
        )


def try_to_write(folder: Path) -> None:
    """Create a folder and, temporarily, a file in it; raise OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / ".writable"
    probe.touch()
    probe.unlink(missing_ok=True)  # another step may try at the same time
