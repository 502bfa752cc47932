"""`kfp-ddp compile`: write the YAML that users upload, or check the committed copy."""

import re
from pathlib import Path

import click

from kfp_ddp import __version__
from kfp_ddp.base.errors import InputError, KfpDdpError

# Host, port and folders, as images are named; a scheme would have an empty folder.
REGISTRY = r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?(:[0-9]+)?(/[a-z0-9]+([._-]+[a-z0-9]+)*)*/?"


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
    help=f"Where the images launcher:{__version__} and trainer:{__version__} are pulled from.",
)
@click.option(
    "--restricted",
    is_flag=True,
    help="For a namespace under PodSecurity restricted: no step may run as root.",
)
def command(check: bool, directory: Path, registry: str, restricted: bool) -> None:
    """Compile every pipeline to a YAML file for upload to Kubeflow Pipelines."""
    from kfp_ddp.pipelines import compiled

    if not re.fullmatch(REGISTRY, registry):
        raise InputError(
            f"registry {registry!r} is not a registry: give host/path in small letters, no scheme"
        )
    if not check:
        for path in compiled.write(directory, registry, restricted):
            click.echo(path)
        return
    found = compiled.differences(directory)
    if found:
        raise KfpDdpError("; ".join(found) + "; run `kfp-ddp compile` and commit the result")
    click.echo(f"{directory} is fresh")
