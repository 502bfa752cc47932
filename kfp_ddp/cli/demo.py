"""`kfp-ddp demo`: the whole pipeline on this machine."""

from pathlib import Path
from typing import Any

import click

from kfp_ddp.cli.options import AS_JSON


@click.command("demo")
@click.option(
    *("--output", "-o"),
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("demo-output"),
    show_default=True,
    help="Folder for the bucket, the synced data and the results.",
)
@click.option(
    "--ranks", type=click.IntRange(1), default=2, show_default=True, help="Processes that train."
)
@click.option("--epochs", type=click.IntRange(1), help="Epochs instead of the demo's own number.")
@AS_JSON
def command(output: Path, ranks: int, epochs: int | None, as_json: bool) -> None:
    """Run bucket, sync, DDP training, evaluation, gate and export for real, without a cluster."""
    from kfp_ddp.local.installed import require

    require("demo")
    from kfp_ddp.local.demo.run import run
    from kfp_ddp.local.session import conduct

    def begin() -> dict[str, Any]:
        click.echo(f"train_resnet.yaml through kfp.local, {ranks} ranks on this machine\n")
        return run(output.resolve(), ranks, {} if epochs is None else {"epochs": epochs})

    conduct(begin, output, as_json)
    if not as_json:
        click.echo("  your photographs, a folder for each class: kfp-ddp run ./photos --local")
