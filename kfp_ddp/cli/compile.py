"""`kfp-ddp compile`: write the YAML that users upload, or check the committed copy."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from kfp_ddp.cli.options import configured
from kfp_ddp.core.errors import KfpDdpError

if TYPE_CHECKING:
    from kfp_ddp.pipelines.compiled import Images

OURS = Path("compiled")


@click.command("compile")
@click.argument(
    "files", nargs=-1, metavar="[FILE]...", type=click.Path(path_type=Path, exists=True)
)
@click.option("--check", is_flag=True, help="Write nothing; fail if a file is stale or orphaned.")
@click.option(
    *("--output", "-o", "--directory", "directory"),
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of the YAML files.  [default: compiled; with FILE that of the file]",
)
@configured("registry", "launcher_image", "trainer_image")
@click.option(
    "--restricted",
    is_flag=True,
    help="For a namespace under PodSecurity restricted: no step may run as root.",
)
def command(
    files: tuple[Path, ...],
    check: bool,
    directory: Path | None,
    registry: str,
    launcher_image: str,
    trainer_image: str,
    restricted: bool,
) -> None:
    """Compile pipelines to YAML files for upload to Kubeflow Pipelines: all of ours, or yours.

    Each pipeline that a Python FILE of yours defines becomes <function>.yaml, with the images of
    our components from your registry, which KFP_DDP_REGISTRY or kfp-ddp.yaml may name once for all:

    kfp-ddp compile my_pipeline.py --registry registry.example.com/ml
    """
    from kfp_ddp.pipelines import compiled
    from kfp_ddp.pipelines.compiled import Images

    images = Images(registry, launcher_image, trainer_image)
    images.check()
    if check:
        _check(files, directory, images, restricted)
    elif files:
        for file in files:
            for path in compiled.write_own(file, directory or file.parent, images, restricted):
                click.echo(path)
    else:
        for path in compiled.write(directory or OURS, images, restricted):
            click.echo(path)


def _check(
    files: tuple[Path, ...], directory: Path | None, images: "Images", restricted: bool
) -> None:
    """Say that what was compiled is fresh.

    Raises:
        KfpDdpError: it is not.
    """
    from kfp_ddp.pipelines import compiled

    found = [] if files else compiled.differences(directory or OURS)
    for file in files:
        found += compiled.differences_of_own(file, directory or file.parent, images, restricted)
    if found:
        raise KfpDdpError("; ".join(found) + "; run `kfp-ddp compile` and commit the result")
    click.echo(f"{', '.join(map(str, files)) or directory or OURS} is fresh")
