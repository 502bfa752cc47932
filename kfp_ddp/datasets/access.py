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
from kfp_ddp.core.log import log
from kfp_ddp.core.run_folder import RunFolder
from kfp_ddp.core.text import from_json, one_line
from kfp_ddp.core.version import pinned
from kfp_ddp.datasets import report
from kfp_ddp.datasets.report import SyncProgress
from kfp_ddp.datasets.settings import options_of
from kfp_ddp.datasets.sync import sync
from kfp_ddp.datasets.versions import leases_of
from kfp_ddp.storage import leases, manifest

OF_ONE_FOLDER = ("dry_run", "max_delete", "verify")
"""Options about earlier content of a folder, which differs from node to node."""


@dataclasses.dataclass(frozen=True)
class EachNode:
    """A dataset that each node syncs itself: source, version and options."""

    source: str
    dataset: str
    digest: str
    options: Mapping[str, Any]
    """Options of the sync, by name."""

    def address(self) -> str:
        """Return the dataset as one text, which cannot be a path."""
        return PER_NODE + json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def parse(cls, address: str) -> Self:
        """Parse the text that `address` returns; raise InputError."""
        try:
            return cls(**from_json(address.removeprefix(PER_NODE)))
        except (ValueError, TypeError) as error:
            raise InputError(
                f"{one_line(address)} names no dataset ({error}): give what the step "
                "dataset_volume returned"
            ) from None


def options_on_nodes(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options for a sync by each node."""
    shared = {name: value for name, value in options.items() if name not in OF_ONE_FOLDER}
    return {**shared, "max_delete": 1.0}


@contextlib.contextmanager
def local_dataset(dataset: str, run_dir: Path, run_id: str = "") -> Iterator[Path]:
    """Yield the local folder of a dataset; one of `EachNode` is synced to the scratch folder.

    The first node writes the manifest to the task's `run_dir`, so that others ignore files that the
    source gained since. Raise StorageError if the source changed since it was listed.
    """
    if not is_per_node(dataset):
        yield pinned(Path(dataset))
        return
    request = EachNode.parse(dataset)
    listed = RunFolder(run_dir).dataset
    target = folders.scratch_dir() / "data"
    options = options_of(request.dataset, request.options)
    only = {row.name for row in manifest.rows(listed)}
    with SyncProgress() as progress:
        result = sync(request.source, target, options, progress.watch, run_id=run_id, only=only)
    log.info(report.line(result))
    same = request.digest in (result.digest, result.exact)
    # Another pod may have the version under the name that an earlier release gave it.
    if not same and request.digest != result.names.listing.crc_digest(options.layout):
        raise StorageError(
            f"{result.source} is version {result.digest[:12]} by now, but the run started with "
            f"{request.digest[:12]}: start a new run, or sync to a PVC if the source changes "
            "during runs"
        )
    if not listed.exists():
        with atomic_write(listed) as file:
            file.write((result.path / manifest.NAME).read_bytes())
    yield result.path


@contextlib.contextmanager
def using(holder: str, run_dir: Path | str, dataset: Path | str = "") -> Iterator[None]:
    """Keep leases of `holder`, a run's id or a step's name, on a task's folder and its dataset."""
    with contextlib.ExitStack() as stack:
        if is_remote(str(run_dir)):
            stack.enter_context(leases.bucket_lease(str(run_dir), holder))
        else:
            stack.enter_context(leases.folder_lease(RunFolder(run_dir).leases, holder))
        version = leases_of(Path(dataset)) if dataset and not is_per_node(str(dataset)) else None
        if version is not None:
            stack.enter_context(leases.folder_lease(version, holder))
        yield
