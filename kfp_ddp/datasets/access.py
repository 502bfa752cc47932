"""Access of a step to its dataset: a local copy per node, and leases on what it reads."""

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from kfp_ddp.core import folders
from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.core.files import atomic_write
from kfp_ddp.core.folders import PER_NODE, is_per_node, is_remote
from kfp_ddp.core.run_folder import RunFolder
from kfp_ddp.datasets import report
from kfp_ddp.datasets.progress import Progress
from kfp_ddp.datasets.settings import options_of
from kfp_ddp.datasets.sync import sync
from kfp_ddp.datasets.versions import leases_of
from kfp_ddp.storage import leases, manifest

OF_ONE_FOLDER = ("delete", "dry_run", "max_delete", "verify")
"""Options that ask what a folder held before, which each node answers for itself."""


@dataclasses.dataclass(frozen=True)
class EachNode:
    """What to bring."""

    source: str
    dataset: str
    digest: str
    options: Mapping[str, Any]
    """Of the sync, by name."""

    def address(self) -> str:
        """One text for it, which no path can be."""
        return PER_NODE + json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def parse(cls, address: str) -> Self:
        """What `address` wrote; raises InputError."""
        try:
            return cls(**json.loads(address.removeprefix(PER_NODE)))
        except (ValueError, TypeError) as error:
            raise InputError(
                f"{address} names no dataset ({error}): give what the step dataset_volume returned"
            ) from None


def options_on_nodes(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a sync as nodes take them, each with a folder of its own.

    Raises:
        InputError: one whose outcome would differ from node to node.
    """
    if options.get("delete") is False:
        raise InputError(
            "sync sets delete=false, which keeps what a folder had before: with publish=each-node "
            "each node has a folder of its own; leave it out"
        )
    found = {name: value for name, value in options.items() if name not in OF_ONE_FOLDER}
    return {**found, "max_delete": 1.0}


@contextlib.contextmanager
def at_hand(dataset: str, run_dir: Path, run_id: str = "") -> Iterator[Path]:
    """The folder of a dataset; one that is to be brought is, below `folders.scratch_dir()`.

    Args:
        dataset: A folder, or an address of `EachNode`.
        run_dir: The task's folder, where the first who brings it leaves what the version holds:
            what the source gains while a run goes on is left out by all who follow.
        run_id: Who keeps the version from being collected where nodes share a folder.

    Raises:
        StorageError: the source changed since it was listed, or cannot be read.
        InputError: it cannot be used.
    """
    if not is_per_node(dataset):
        yield Path(dataset)
        return
    wanted, listed = EachNode.parse(dataset), RunFolder(run_dir).dataset
    target = Path(folders.scratch_dir(), "data")
    options = options_of(wanted.dataset, wanted.options)
    only = {row.name for row in manifest.rows(listed)}
    with Progress() as progress:
        found = sync(wanted.source, target, options, progress.watch, run_id=run_id, only=only)
    print(report.line(found), flush=True)
    if found.digest != wanted.digest:
        raise StorageError(
            f"{found.source} is version {found.digest[:12]} by now, and the run began with "
            f"{wanted.digest[:12]}: start a new run, or sync to a claim where the source changes "
            "while runs go on"
        )
    if not listed.exists():
        with atomic_write(listed) as file:
            file.write((found.path / manifest.NAME).read_bytes())
    yield found.path


@contextlib.contextmanager
def using(holder: str, run_dir: Path | str, dataset: Path | str = "") -> Iterator[None]:
    """Hold the folder of a run's task, and the version of a dataset where it is a version.

    Args:
        holder: Id of the run, or name of the step where that is not known.
        run_dir: Folder of the task, or its address.
        dataset: Folder of the dataset; '' for none.
    """
    with contextlib.ExitStack() as held:
        if is_remote(str(run_dir)):
            held.enter_context(leases.bucket_lease(str(run_dir), holder))
        else:
            held.enter_context(leases.folder_lease(RunFolder(run_dir).leases, holder))
        version = leases_of(Path(dataset)) if dataset and not is_per_node(str(dataset)) else None
        if version is not None:
            held.enter_context(leases.folder_lease(version, holder))
        yield
