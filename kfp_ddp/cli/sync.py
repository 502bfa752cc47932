"""`kfp-ddp sync`: versions of a dataset in a folder, without Kubeflow."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import click

from kfp_ddp.cli.options import added, echo, field_option
from kfp_ddp.core.folders import with_home
from kfp_ddp.datasets.options import SyncOptions, expanded

SHORT = {"dry_run": ["-n"], "concurrency": ["-j"]}


@click.command("sync")
@click.argument("source")
@click.argument("folder", type=click.Path(path_type=Path))
@added(
    *(field_option(field, *SHORT.get(field.name, ())) for field in dataclasses.fields(SyncOptions))
)
@click.option("-q", "--quiet", is_flag=True, help="No progress.")
def command(source: str, folder: Path, quiet: bool, **options: Any) -> None:
    """Download SOURCE (gs://bucket/prefix, s3://bucket/prefix or a folder) to a version in FOLDER.

    The version is named by its content, and the link `current` in FOLDER leads to it. rclone,
    `gcloud storage rsync` and `aws s3 sync` bring the files alone.
    """
    from kfp_ddp.datasets import report
    from kfp_ddp.datasets.report import SyncProgress
    from kfp_ddp.datasets.sync import sync
    from kfp_ddp.storage.address import check_address

    source = with_home(source)
    check_address("source", source)
    checked = SyncOptions(**{**options, "exclude": expanded(options["exclude"])})
    with SyncProgress(sys.stderr, quiet=quiet) as progress:
        result = sync(source, folder, checked, progress.watch)
    if result.planned:
        for line in report.table(result):
            echo(line)
    echo(report.line(result))
