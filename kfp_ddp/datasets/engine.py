"""The step `data_sync`: options from the pipeline, the sync, its artifacts."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from kfp_ddp.core.folders import data_dir as folder_of_data
from kfp_ddp.core.log import log
from kfp_ddp.core.outputs import SyncFacts
from kfp_ddp.core.run_folder import check_run_id
from kfp_ddp.core.step import Artifact, step, write_artifact
from kfp_ddp.core.text import printable
from kfp_ddp.datasets import report as reports
from kfp_ddp.datasets.report import SyncProgress
from kfp_ddp.datasets.settings import options_of, rule_of
from kfp_ddp.datasets.sync import sync

SHOWN = 40
"""Lines of what a dry run would do, of which a large dataset has millions."""


class Synced(NamedTuple):
    """Full digest of the version, the folder it lies in, and the name of its dataset."""

    digest: str
    path: str
    dataset: str


@step
def run(
    *,
    dataset_version: Artifact,
    sync_report: Artifact,
    source: str,
    data_dir: str,
    dataset: str,
    options: Mapping[str, Any],
    run_id: str,
    layout: Mapping[str, Any] = MappingProxyType({}),
) -> Synced:
    """Sync, print what happened, and write the version's facts and the report."""
    checked = options_of(dataset, options)
    rule = rule_of(layout)
    if run_id:
        check_run_id(run_id)
    with SyncProgress(sys.stdout) as progress:
        target = Path(folder_of_data(data_dir))
        result = sync(source, target, checked, progress.watch, run_id=run_id, rule=rule)
    if result.planned:
        *lines, total = reports.table(result)
        more = [f"… {len(lines) - SHOWN:,} more"] if len(lines) > SHOWN else []
        log.info("\n".join([*lines[:SHOWN], *more, total]))
    log.info(reports.line(result))
    facts: SyncFacts = {
        "dataset": result.dataset,
        "source": result.source,
        "digest": result.digest,
        "path": str(result.path),
        "files": result.files,
        "bytes": result.bytes,
        "downloaded": result.downloaded,
    }
    if result.images and result.images.warnings:
        facts["warnings"] = "\n".join(map(printable, result.images.warnings))
    write_artifact(dataset_version, json.dumps(facts, indent=1) + "\n", **facts)
    write_artifact(sync_report, reports.markdown(result))
    return Synced(result.digest, str(result.path), result.dataset)
