"""`kfp-ddp sync`: download a bucket prefix to a folder, without Kubeflow."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import click

from kfp_ddp.cli.options import added, echo, field_option
from kfp_ddp.datasets.options import SyncOptions, expanded

SHORT = {"dry_run": ["-n"], "concurrency": ["-j"]}
FOLDER_DEFAULTS: dict[str, Any] = {"verify": "quick", "delete": False}
"""Defaults for a plain folder, which users and other programs may also write to."""


def _option(field: "dataclasses.Field[Any]") -> Any:
    more: dict[str, Any] = {}
    if field.name in FOLDER_DEFAULTS:
        shown = f"{FOLDER_DEFAULTS[field.name]}, with --versions {field.default}".lower()
        more = {"default": None, "show_default": shown}
    return field_option(field, *SHORT.get(field.name, ()), **more)


@click.command("sync")
@click.argument("source")
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--versions", is_flag=True, help="Store versions by digest, and a link `current`.")
@added(*(_option(field) for field in dataclasses.fields(SyncOptions) if field.name != "mirror"))
@click.option("-q", "--quiet", is_flag=True, help="No progress.")
def command(source: str, target: Path, versions: bool, quiet: bool, **options: Any) -> None:
    """Download SOURCE (gs://bucket/prefix, s3://bucket/prefix or a folder) to the folder TARGET.

    Without --versions the files are directly in TARGET; existing files are compared by size and
    time, and other files are not deleted unless --delete is given.
    """
    from kfp_ddp.datasets import report
    from kfp_ddp.datasets.report import SyncProgress
    from kfp_ddp.datasets.sync import sync
    from kfp_ddp.storage.kinds import check_address

    check_address("source", source)
    options["exclude"] = expanded(options["exclude"])
    changes = {name: value for name, value in options.items() if value is not None}
    defaults = {} if versions else FOLDER_DEFAULTS
    checked = SyncOptions(mirror=not versions, **(defaults | changes))
    with SyncProgress(sys.stderr, quiet=quiet) as progress:
        result = sync(source, target, checked, progress.watch)
    if checked.dry_run:
        for line in report.table(result):
            echo(line)
    echo(report.line(result))
