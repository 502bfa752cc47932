"""`kfp-ddp upload`: a pipeline to a KFP server."""

from pathlib import Path

import click

from kfp_ddp.cli.options import AS_JSON, configured, connected, echo_json
from kfp_ddp.core.config import Connection


@click.command("upload")
@click.argument("pipeline", metavar="PIPELINE")
@click.option("--name", default="", help="Name on the server.  [default: that of the pipeline]")
@click.option("--description", default="", help="What is new in this version.")
@AS_JSON
@configured("registry", "launcher_image", "trainer_image")
@connected
def command(
    connection: Connection,
    pipeline: str,
    name: str,
    description: str,
    as_json: bool,
    registry: str,
    launcher_image: str,
    trainer_image: str,
) -> None:
    """Have the server hold PIPELINE, a compiled YAML file or one of ours, as its newest version.

    The version is named by its content: where the newest one is the same, nothing is sent.

    \b
    kfp-ddp upload train_resnet
    kfp-ddp upload my_pipeline.yaml --name nightly
    """
    from kfp_ddp.client import submission
    from kfp_ddp.client.connection import open_client
    from kfp_ddp.client.uploads import upload
    from kfp_ddp.core.errors import InputError
    from kfp_ddp.core.settings import hint
    from kfp_ddp.pipelines import NAMES
    from kfp_ddp.pipelines.compiled import Images
    from kfp_ddp.pipelines.document import is_file, read

    if is_file(pipeline):
        document = read(Path(pipeline))
    else:
        found = submission.ours(pipeline, Images(registry, launcher_image, trainer_image))
        if found is None:
            near = hint(pipeline, NAMES) or f", which are {', '.join(NAMES)}"
            raise InputError(f"{pipeline} is no YAML file, and none of our pipelines{near}")
        document = found
    with open_client(connection) as client:
        done = upload(client, document, name, description)
    if as_json:
        echo_json(done._asdict())
    elif done.new:
        click.echo(f"uploaded {done.pipeline}, version {done.version}")
    else:
        click.echo(f"nothing to do: {done.pipeline} is at version {done.version} already")
