"""`kfp-ddp download`: what a run made, brought here."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from kfp_ddp.cli.options import AS_JSON, connected, echo_json

if TYPE_CHECKING:
    from kfp_ddp.core.config import Connection


@click.command("download")
@click.argument("run")
@click.option(
    *("--output", "-o"),
    type=click.Path(path_type=Path, file_okay=False),
    help="A new folder for it.  [default: the name of the run]",
)
@click.option("--checkpoint", is_flag=True, help="Bring the newest checkpoint, too.")
@AS_JSON
@connected
def command(
    run: str, output: Path | None, checkpoint: bool, as_json: bool, connection: "Connection"
) -> None:
    """Bring what RUN made here: bundle, evaluation with its report, curves, settings, metrics.

    RUN is its id or the first characters of it, its name, `last`, or the folder of a run with
    --local. Files on a claim come through a pod that mounts it, which is gone afterwards: you
    need the rights to create pods and pods/exec in the namespace. Without them, or where they are
    gone, the bundle alone comes from the run's destination. It is compared with its digests, and
    nothing is left here of a download that failed.

    kfp-ddp download last --output flowers-model
    """
    from kfp_ddp.client.inspection import subjects
    from kfp_ddp.client.inspection.take import check_output, take
    from kfp_ddp.client.inspection.uploaded import uploaded
    from kfp_ddp.core.errors import KfpDdpError
    from kfp_ddp.local.results import shown

    with subjects(connection) as known:
        subject = known.find(run)
        where = output or Path(subject.name.replace("/", "-").strip(".") or subject.id)
        check_output(where)
        try:
            found = take(subject.files(), where, checkpoint=checkpoint)
        except KfpDdpError as error:
            bundle = uploaded(subject.id, subject.parameters)
            if bundle is None:
                raise
            click.echo(f"warning: {error}; the bundle comes from {bundle.where}", err=True)
            found = take(bundle, where)
    if as_json:
        tasks = [
            {name: str(value) if isinstance(value, Path) else value for name, value in each.items()}
            for each in map(vars, found)
        ]
        echo_json({"run_id": subject.id, "output": str(where), "tasks": tasks})
        return
    for each in found:
        click.echo(f"{each.task}: {each.bytes / 1e6:,.1f} MB")
        paths = (each.bundle, each.report, each.loss_curve, each.checkpoint)
        for name, path in zip(("bundle", "report", "curves", "checkpoint"), paths, strict=True):
            if path is not None:
                click.echo(f"  {name:<12}{shown(path)}")
        if each.bundle is None:
            click.echo("  no bundle: the run exported none")
    if any(each.bundle for each in found):
        path = next(each.bundle for each in found if each.bundle)
        click.echo(f"try it: kfp-ddp predict {shown(path)} picture.jpg")
