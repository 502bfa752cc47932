"""The step `data_sync`: options from the pipeline, the sync, its artifacts."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from kfp_ddp.base.errors import InputError
from kfp_ddp.components.data_sync import report
from kfp_ddp.components.data_sync.dataset import dataset_name
from kfp_ddp.components.data_sync.progress import Progress
from kfp_ddp.components.data_sync.settings import options_of
from kfp_ddp.components.data_sync.sync import sync
from kfp_ddp.components.shared.step import step


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
    inputs: Mapping[str, object],
    more: Mapping[str, object],
) -> Synced:
    """Sync, print what happened, and write the version's facts and the report.

    Args:
        version: Gets the facts.
        report_artifact: Gets the report.
        source: Where the data comes from.
        data_dir: Folder that holds the versions.
        dataset: Name of the dataset; empty for one made from the source.
        inputs: Options by name, the step's inputs.
        more: Further ones by name, which go before.

    Raises:
        InputError: one line, before a byte is written wherever that can be known.
    """
    if not source:
        raise InputError("source is empty; give gs://bucket/prefix, or a folder")
    dataset = dataset_name(dataset, source)
    options = options_of(dataset, inputs, more)
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
