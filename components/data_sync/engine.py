"""The step `data_sync`: options from the pipeline, the sync, its artifacts."""

import json
import sys
from pathlib import Path
from typing import NamedTuple, Protocol

from kfp_ddp.components.data_sync import report
from kfp_ddp.components.data_sync.dataset import dataset_name
from kfp_ddp.components.data_sync.options import Options
from kfp_ddp.components.data_sync.progress import Progress
from kfp_ddp.components.data_sync.sync import sync
from kfp_ddp.components.step import step
from kfp_ddp.training.errors import InputError


class Artifact(Protocol):
    """What is used of a KFP output artifact."""

    path: str
    metadata: dict[str, object]


class Synced(NamedTuple):
    """Full digest of the version, and the folder it lies in."""

    digest: str
    path: str


@step
def run(
    version: Artifact,
    report_artifact: Artifact,
    source: str,
    data_dir: str,
    dataset: str,
    include: str,
    exclude: str,
    hostile_names: str,
    symlinks: str,
    verify: str,
    pack: str,
    delete: bool,
    max_delete: float,
    dry_run: bool,
    concurrency: int,
    bandwidth_mb: float,
    keep_versions: int,
    keep_hours: float,
    lock_wait: int,
) -> Synced:
    """Sync, print what happened, and write the version's facts and the report."""
    if not source:
        raise InputError("source is empty; give gs://bucket/prefix, or a folder")
    dataset = dataset_name(dataset, source)
    options = Options(
        dataset=dataset,
        include=globs(include),
        exclude=globs(exclude),
        hostile_names=hostile_names,
        symlinks=symlinks,
        verify=verify,
        pack=pack,
        delete=delete,
        max_delete=max_delete,
        dry_run=dry_run,
        concurrency=concurrency,
        bandwidth=bandwidth_mb * 1e6,
        keep_versions=keep_versions,
        keep_hours=keep_hours,
        lock_wait=lock_wait,
    )
    with Progress(sys.stdout) as progress:
        result = sync(source, Path(data_dir), options, progress.watch)
    if result.planned:
        print("\n".join(report.table(result)))
    print(report.line(result), flush=True)
    facts = {
        "dataset": dataset,
        "source": source,
        "digest": result.digest,
        "path": str(result.path),
        "files": result.files,
        "bytes": result.bytes,
        "downloaded": result.downloaded,
    }
    version.metadata.update(facts)
    Path(version.path).write_text(json.dumps(facts, indent=1) + "\n")
    Path(report_artifact.path).write_text(report.markdown(result))
    return Synced(result.digest, str(result.path))


def globs(text: str) -> tuple[str, ...]:
    """Patterns from a comma-separated list."""
    return tuple(part.strip() for part in text.split(",") if part.strip())
