"""`kfp-ddp compile` and `upload`: pipelines as YAML, and on a KFP server."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from kfp_ddp.cli.options import AS_JSON, FOLDER, configured, echo, show, text_option, with_client
from kfp_ddp.core.container_images import SETTINGS, Images
from kfp_ddp.core.errors import KfpDdpError

if TYPE_CHECKING:
    from kfp_ddp.client.api import Client

COMPILED = Path("compiled")


@click.command("compile")
@click.argument(
    "files", nargs=-1, metavar="[FILE]...", type=click.Path(path_type=Path, exists=True)
)
@click.option(
    "--check", is_flag=True, help="Write nothing; fail if a file is out of date or has no pipeline."
)
@click.option(
    *("--output", "-o", "--directory", "directory"),
    type=FOLDER,
    help="Folder of the YAML files.  [default: compiled; with FILE that of the file]",
)
@configured(*SETTINGS)
@click.option(
    "--restricted",
    is_flag=True,
    help="For a namespace with PodSecurity restricted: no step runs as root.",
)
def compile_(
    files: tuple[Path, ...], check: bool, directory: Path | None, restricted: bool, **settings: str
) -> None:
    """Compile pipelines to YAML files for Kubeflow Pipelines: the built-in ones, or those of FILE.

    Each pipeline of a Python FILE becomes <function>.yaml. Its steps have public images, and take
    our source from the ConfigMap of kfp-ddp install, or have the images of your registry, which
    can also be set by KFP_DDP_REGISTRY or in your settings:

    kfp-ddp compile my_pipeline.py --registry registry.example.com/ml
    """
    from kfp_ddp.pipelines import compiled

    images = Images.create(settings)
    targets = [(directory or file.parent, compiled.pipelines_of(file)) for file in files]
    targets = targets or [(directory or COMPILED, compiled.built_in())]
    if not check:
        for folder, pipelines in targets:
            for path in compiled.write(pipelines, folder, images, restricted):
                echo(path)
        return
    differences = [] if files else compiled.orphans(directory or COMPILED)
    for folder, pipelines in targets:
        differences += compiled.differences(pipelines, folder, images, restricted)
    if differences:
        again = " ".join(("kfp-ddp compile", *map(str, files)))
        raise KfpDdpError("; ".join(differences) + f"; run `{again}` and commit the result")
    echo(f"{', '.join(map(str, files)) or directory or COMPILED} is up to date")


@click.command("upload")
@click.argument("pipeline", metavar="PIPELINE")
@text_option("--name", help="Name on the server.  [default: the pipeline's]")
@text_option("--description", help="Description of this version.")
@AS_JSON
@configured(*SETTINGS)
@with_client
def upload(
    client: "Client", pipeline: str, name: str, description: str, as_json: bool, **_: str
) -> None:
    """Upload PIPELINE, a compiled YAML file or a built-in pipeline, as the newest version.

    The version is named by its content. If the newest one has the same content, nothing is sent.

    \b
    kfp-ddp upload train_resnet
    kfp-ddp upload my_pipeline.yaml --name nightly
    """
    done = client.upload(pipeline, name, description)
    line = f"unchanged: {done.pipeline} already has version {done.version}"
    if done.new:
        line = f"uploaded {done.pipeline}, version {done.version}"
    show(as_json, done._asdict(), line)
