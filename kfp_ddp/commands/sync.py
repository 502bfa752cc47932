"""`kfp-ddp sync`: a bucket prefix to a folder, without Kubeflow."""

import sys
from pathlib import Path
from typing import Any

import click

from kfp_ddp.components.data_sync.options import Options

SHORT = {"dry_run": ["-n"], "concurrency": ["-j"]}
OF_A_FOLDER: dict[str, Any] = {"verify": "quick", "delete": False}
"""Other defaults for a plain folder, which people and other programs write to as well."""


def _option(name: str) -> click.Option:
    """The option of the command line for a field of `Options`."""
    field = Options.model_fields[name]
    flag = f"--{name.replace('_', '-')}"
    more: dict[str, Any] = {"help": field.description, "default": field.default}
    if name in OF_A_FOLDER:
        shown = f"{OF_A_FOLDER[name]}, with --versions {field.default}".lower()
        more |= {"default": None, "show_default": shown}
    if field.annotation is bool:
        flag += f"/--no-{flag[2:]}" if field.default else ""
        more["is_flag"] = True
    elif isinstance(field.default, tuple):
        more |= {"multiple": True, "help": f"{field.description} May be repeated."}
    else:
        known = Options.choices(name)
        more["type"] = click.Choice(known) if known else field.annotation
    return click.Option([flag, *SHORT.get(name, ())], **more)


OPTIONS = [_option(name) for name in Options.model_fields if name != "mirror"]


@click.command("sync", context_settings={"show_default": True})
@click.argument("source")
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--versions", is_flag=True, help="Keep versions by digest, and a link `current`.")
@click.option("-q", "--quiet", is_flag=True, help="No progress.")
def command(source: str, target: Path, versions: bool, quiet: bool, **options: Any) -> None:
    """Bring SOURCE (gs://bucket/prefix, s3://bucket/prefix or a folder) to the folder TARGET.

    Without --versions the files themselves lie in TARGET; what is there already is compared by
    size and time, and extras stay unless --delete is given.
    """
    from kfp_ddp.components.data_sync import report
    from kfp_ddp.components.data_sync.progress import Progress
    from kfp_ddp.components.data_sync.sync import sync

    given = {name: value for name, value in options.items() if value is not None}
    defaults = {} if versions else OF_A_FOLDER
    checked = Options.create(mirror=not versions, **(defaults | given))
    with Progress(sys.stderr, quiet=quiet) as progress:
        result = sync(source, target, checked, progress.watch)
    if checked.dry_run:
        click.echo("\n".join(report.table(result)))
    click.echo(report.line(result))


command.params[-1:-1] = OPTIONS
