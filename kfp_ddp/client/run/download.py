"""Download what a run produced: bundle, reports and curves, also as far as only KFP has them."""

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from kfp_ddp.client.run.kfp_files import LOSS_CURVE
from kfp_ddp.client.run.run_files import RunFiles
from kfp_ddp.core.errors import InputError, StorageError, writing
from kfp_ddp.core.run_folder import REPORT, RunFolder
from kfp_ddp.models import bundle
from kfp_ddp.report.training import training_curves, training_page
from kfp_ddp.runs.record import newest_checkpoint
from kfp_ddp.training.spec.metrics import read_events

BUNDLE = RunFolder.BUNDLE
CHECKPOINTS = RunFolder.CHECKPOINTS
REPORTS = ("config.json", "metrics.jsonl", "evaluation*/*", LOSS_CURVE)


class Downloaded(NamedTuple):
    """The local files of one task of a run; None for those that it did not write."""

    task: str
    bytes: int
    bundle: Path | None
    report: Path | None
    loss_curve: Path | None
    checkpoint: Path | None


class Results(NamedTuple):
    """What was downloaded of a run, and what its files lack."""

    folder: Path
    tasks: list[Downloaded]
    note: str


def download(files: RunFiles, output: Path, *, checkpoint: bool = False) -> list[Downloaded]:
    """Download what a run produced to a new folder, all of it or nothing.

    The files of a single task lie directly in `output`, those of several tasks in a folder each.
    InputError: the folder is not empty, or the run wrote nothing. StorageError: a bundle is
    damaged, or the disk is full.
    """
    with _new_folder(output) as temporary:
        sizes = files.sizes()
        tasks = sorted({name.split("/")[0] for name in sizes if _is_result(name)})
        if not tasks:
            raise InputError(
                f"there are no results of the run in {files.where}: it wrote none, or they were "
                "deleted"
            )
        names = list(_select(sizes, checkpoint))
        files.fetch(names, temporary)
        for task in tasks:
            _complete(temporary / task, task, files.where)
        if len(tasks) == 1:
            single = (temporary / tasks[0]).rename(temporary / ".task")
            for path in single.iterdir():
                path.rename(temporary / path.name)
            single.rmdir()
    # Only now the files are where the user finds them.
    results = []
    for task in tasks:
        folder = output if len(tasks) == 1 else output / task
        own = [name.removeprefix(f"{task}/") for name in names if name.startswith(f"{task}/")]
        results.append(_downloaded(task, folder, own))
    return results


def _complete(folder: Path, task: str, where: str) -> None:
    """Add the page of loss curves to a task; raise StorageError for a damaged bundle."""
    exported = folder / BUNDLE
    if exported.exists() and not bundle.intact(exported):
        raise StorageError(
            f"the bundle of {task} is damaged or incomplete ({where}): try again, or retry the "
            "run's export"
        )
    if training_curves(read_events(RunFolder(folder).metrics)):
        (folder / LOSS_CURVE).write_text(training_page(folder))


def _downloaded(task: str, folder: Path, names: Iterable[str]) -> Downloaded:
    """Return what a task has in its local folder; `names` are those of its files."""
    paths = [folder / name for name in names]
    newest = newest_checkpoint(folder)
    return Downloaded(
        task=task,
        bytes=sum(path.stat().st_size for path in paths if path.exists()),
        bundle=_existing(folder / BUNDLE),
        report=_existing(RunFolder(folder).evaluation("val") / REPORT),
        loss_curve=_existing(folder / LOSS_CURVE),
        checkpoint=_existing(newest.path) if newest else None,
    )


def _existing(path: Path) -> Path | None:
    return path if path.exists() else None


def check_output(output: Path) -> None:
    """Raise InputError for a folder that is not empty."""
    if not output.exists():
        return
    if not output.is_dir() or any(output.iterdir()):
        raise InputError(f"{output} already exists: name a new folder by --output")


def _is_result(name: str) -> bool:
    return any(fnmatch(name, f"*/{pattern}") for pattern in (*REPORTS, f"{BUNDLE}/*"))


def _select(sizes: Iterable[str], checkpoint: bool) -> Iterator[str]:
    """Yield the names to download."""
    newest: dict[str, str] = {}
    for name in sizes:
        task, *parts = name.split("/")
        if parts[:1] == [CHECKPOINTS] and parts[-1] == "manifest.json":
            folders = [newest.get(task, ""), "/".join([task, *parts[:2]])]
            # Of two numbers of steps, the longer one is larger.
            newest[task] = max(folders, key=lambda folder: (len(folder), folder))
        elif _is_result(name):
            yield name
    if checkpoint and newest:
        prefixes = tuple(f"{folder}/" for folder in newest.values())
        yield from (name for name in sizes if name.startswith(prefixes))


@contextmanager
def _new_folder(output: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `output` on success, and is deleted otherwise."""
    target = Path(os.path.abspath(output))
    with writing(output):
        check_output(output)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            yield temporary
            temporary.chmod(0o755)
            temporary.replace(target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
