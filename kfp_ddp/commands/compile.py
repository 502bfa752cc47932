"""`kfp-ddp compile`: write the YAML that users upload, or check the committed copy."""

import re
from pathlib import Path

import click

from kfp_ddp.base.errors import InputError, KfpDdpError


@click.command("compile")
@click.option("--check", is_flag=True, help="Write nothing; fail if a file is stale or orphaned.")
@click.option(
    "--directory",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("compiled"),
    show_default=True,
    help="Folder of the YAML files.",
)
@click.option(
    "--registry",
    default="ghcr.io/kfp-ddp",
    show_default=True,
    help="Where the images launcher:0.1.0 and trainer:0.1.0 are pulled from.",
)
def command(check: bool, directory: Path, registry: str) -> None:
    """Compile every pipeline to a YAML file for upload to Kubeflow Pipelines."""
    from kfp_ddp.pipelines import compiled

    if not re.fullmatch(r"[a-z0-9][a-z0-9.:/_-]*", registry):
        raise InputError(f"registry {registry!r} is not a registry; give host/path, no scheme")
    if not check:
        for path in compiled.write(directory, registry):
            click.echo(path)
        return
    found = compiled.differences(directory)
    if found:
        raise KfpDdpError("; ".join(found) + "; run `kfp-ddp compile` and commit the result")
    click.echo(f"{directory} is fresh")
