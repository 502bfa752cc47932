"""`kfp-ddp download`: the results of a run."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kfp_ddp.cli.options import AS_JSON, FOLDER, connected, echo, echo_json
from kfp_ddp.core.errors import KfpDdpError

if TYPE_CHECKING:
    from kfp_ddp.core.config import Connection


@click.command("download")
@click.argument("run")
@click.option(
    *("--output", "-o"), type=FOLDER, help="A new folder.  [default: the name of the run]"
)
@click.option("--checkpoint", is_flag=True, help="Also download the newest checkpoint.")
@AS_JSON
@connected
def command(
    run: str, output: Path | None, checkpoint: bool, as_json: bool, connection: "Connection"
) -> None:
    """Download the results of RUN: bundle, evaluation with its report, curves, settings, metrics.

    RUN is an id or the start of one, a name, `last`, or the folder of a run with --local. Files
    on a PVC are read through a temporary pod: you need permission to create pods and pods/exec in
    the namespace. If the files cannot be read, only the bundle is downloaded, from the run's
    destination. The bundle is verified, and a failed download leaves no files.

    kfp-ddp download last --output flowers-model
    """
    from kfp_ddp.client.download import check_output, download, find_uploaded
    from kfp_ddp.client.run_info import run_finder
    from kfp_ddp.local.results import shown

    with run_finder(connection) as finder:
        info = finder.find(run)
        folder = output or Path(info.name.replace("/", "-").strip(".") or info.id)
        check_output(folder)
        try:
            tasks = download(info.files(), folder, checkpoint=checkpoint)
        except KfpDdpError as error:
            bundle = find_uploaded(info.id, info.parameters)
            if bundle is None:
                raise
            echo(f"warning: {error}; downloading only the bundle, {bundle.where}", err=True)
            tasks = download(bundle, folder)
    if as_json:
        rows = [
            {name: str(value) if isinstance(value, Path) else value for name, value in row.items()}
            for row in map(asdict, tasks)
        ]
        echo_json({"run_id": info.id, "output": str(folder), "tasks": rows})
        return
    for task in tasks:
        echo(f"{task.task}: {task.bytes / 1e6:,.1f} MB")
        paths = (task.bundle, task.report, task.loss_curve, task.checkpoint)
        for name, path in zip(("bundle", "report", "curves", "checkpoint"), paths, strict=True):
            if path is not None:
                echo(f"  {name:<12}{shown(path)}")
        if task.bundle is None:
            echo("  no bundle: the run exported none")
    bundles = [task.bundle for task in tasks if task.bundle]
    if bundles:
        echo(f"try it: kfp-ddp predict {shown(bundles[0])} picture.jpg")
