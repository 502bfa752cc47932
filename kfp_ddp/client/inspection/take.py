"""What is brought of a run: its bundle, its reports, its curves, and checkpoints where asked."""

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path

from kfp_ddp.client.run_files import RunFiles
from kfp_ddp.core.errors import InputError, StorageError, full
from kfp_ddp.core.run_folder import REPORT, RunFolder
from kfp_ddp.models import bundle
from kfp_ddp.report.events import read_events
from kfp_ddp.report.training import training_curves, training_page
from kfp_ddp.runs.train.outputs import newest_checkpoint

BUNDLE = RunFolder.BUNDLE
REPORTS = ("config.json", "metrics.jsonl", "evaluation*/*")
CHECKPOINTS = RunFolder.CHECKPOINTS


@dataclass(frozen=True)
class Taken:
    """What came of one task of a run; None where it left none."""

    task: str
    bundle: Path | None
    report: Path | None
    loss_curve: Path | None
    checkpoint: Path | None
    bytes: int


def take(files: RunFiles, output: Path, *, checkpoint: bool = False) -> list[Taken]:
    """Bring what a run made to a new folder, all of it or nothing.

    Args:
        files: The run's.
        output: A folder that is not there, or empty. A run of one task has its files directly in
            it, else each task has a folder.
        checkpoint: Bring the newest checkpoint, too.

    Raises:
        InputError: the folder holds something, or the run left nothing.
        StorageError: a bundle came damaged, or there is no room.
        KfpDdpError: the files cannot be had.
    """
    with _appearing(output) as aside:
        sizes = files.sizes()
        tasks = sorted({name.split("/")[0] for name in sizes if _of_a_task(name)})
        if not tasks:
            raise InputError(
                f"there is nothing of the run in {files.where}: it left nothing, or was pruned"
            )
        names = list(_wanted(sizes, checkpoint))
        files.bring(names, aside)
        for task in tasks:
            _check(aside / task, files)
        found = [
            _taken(aside / task, sum(sizes[n] for n in names if n.startswith(f"{task}/")))
            for task in tasks
        ]
        if len(tasks) == 1:
            _lift(aside / tasks[0], aside)
            return [_moved(found[0], aside / tasks[0], output)]
        return [_moved(each, aside / each.task, output / each.task) for each in found]


def _of_a_task(name: str) -> bool:
    return any(fnmatch(name, f"*/{each}") for each in (*REPORTS, f"{BUNDLE}/*"))


def _wanted(sizes: Iterable[str], checkpoint: bool) -> Iterator[str]:
    """Names to bring; of a bundle what says that it is whole goes last."""
    newest: dict[str, str] = {}
    for name in sizes:
        parts = name.split("/")
        if parts[1:2] == [CHECKPOINTS] and parts[-1] == "manifest.json":
            folders = [newest.get(parts[0], ""), "/".join(parts[:3])]
            newest[parts[0]] = max(folders, key=lambda folder: (len(folder), folder))
        elif _of_a_task(name) and not name.endswith(f"{BUNDLE}/{bundle.SUCCESS}"):
            yield name
    yield from (name for name in sizes if name.endswith(f"/{BUNDLE}/{bundle.SUCCESS}"))
    if checkpoint:
        chosen = tuple(f"{folder}/" for folder in newest.values())
        yield from (name for name in sizes if name.startswith(chosen) and chosen)


def _check(folder: Path, files: RunFiles) -> None:
    """Refuse a bundle that is not what was exported."""
    made = folder / BUNDLE
    if made.exists() and not bundle.intact(made):
        raise StorageError(
            f"the bundle of {folder.name} came damaged, or is not whole where it lies "
            f"({files.where}): try again, or retry the run's export"
        )


def _taken(folder: Path, size: int) -> Taken:
    task = RunFolder(folder)
    loss_curve = folder / "loss_curve.html"
    if training_curves(read_events(task.metrics)):
        loss_curve.write_text(training_page(folder))
    newest = newest_checkpoint(folder)
    return Taken(
        task=folder.name,
        bundle=_there(task.bundle),
        report=_there(task.evaluation("val") / REPORT),
        loss_curve=_there(loss_curve),
        checkpoint=newest.path if newest else None,
        bytes=size,
    )


def _there(path: Path) -> Path | None:
    return path if path.exists() else None


def _moved(found: Taken, before: Path, after: Path) -> Taken:
    """The same where its files are in the end."""

    def there(path: Path | None) -> Path | None:
        return path and after / path.relative_to(before)

    return replace(
        found,
        bundle=there(found.bundle),
        report=there(found.report),
        loss_curve=there(found.loss_curve),
        checkpoint=there(found.checkpoint),
    )


def _lift(folder: Path, above: Path) -> None:
    """Put what a folder holds in the one above it."""
    held = folder.rename(above / ".task")
    for each in held.iterdir():
        each.rename(above / each.name)
    held.rmdir()


def check_output(output: Path) -> None:
    """Refuse a folder that holds something already; raises InputError."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InputError(f"{output} is there already: name a new folder by --output")


@contextmanager
def _appearing(output: Path) -> Iterator[Path]:
    """A folder beside `output` that takes its name when the block ends well, and goes otherwise.

    Raises:
        InputError: `output` holds something.
        StorageError: it cannot be made.
    """
    target = Path(os.path.abspath(output))
    try:
        check_output(output)
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise StorageError(full(error, output)) from None
    try:
        yield aside
        aside.chmod(0o755)
        aside.replace(target)
    except OSError as error:
        raise StorageError(full(error, output)) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
