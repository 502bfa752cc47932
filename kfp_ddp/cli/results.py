"""`kfp-ddp compare`, `download` and `report`: what runs wrote."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from kfp_ddp.cli.options import FOLDER, echo, echo_json, served
from kfp_ddp.core.errors import InputError, writing

if TYPE_CHECKING:
    from kfp_ddp.client.api import Client


@click.command("compare")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@served
def compare(runs: tuple[str, ...], as_json: bool, client: "Client") -> None:
    """Compare RUNs: settings that differ, metrics with 95 % confidence intervals.

    A RUN is an id or the start of one, a name, `last`, or the folder of a run with --local. Each
    training of a run has its own column. `*` marks the best value of a row.

    kfp-ddp compare last 8fa2b9a1 ./photos-model
    """
    compared = client.compare(*runs)
    if as_json:
        echo_json(compared.document())
    else:
        from kfp_ddp.client.run.follow import console

        compared.print(console())


@click.command("download")
@click.argument("run")
@click.option(
    *("--output", "-o"), type=FOLDER, help="A new folder.  [default: the name of the run]"
)
@click.option("--checkpoint", is_flag=True, help="Also download the newest checkpoint.")
@served
def download(
    run: str, output: Path | None, checkpoint: bool, as_json: bool, client: "Client"
) -> None:
    """Download the results of RUN: bundle, evaluation with its report, curves, settings, metrics.

    RUN is an id or the start of one, a name, `last`, or the folder of a run with --local. Files
    on a PVC are read through a temporary pod: you need permission to create pods and pods/exec in
    the namespace. Otherwise the reports and metrics are read through KFP's UI, and the bundle from
    the run's destination. The bundle is verified, and a failed download leaves no files.

    kfp-ddp download last --output flowers-model
    """
    from kfp_ddp.local.display import shown

    info = client.get_run(run)
    folder, tasks, note = info.download(output or "", checkpoint)
    if note:
        echo(f"warning: {note}", err=True)
    if as_json:
        rows = [task._asdict() for task in tasks]
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


PATTERNS = ("{}", "*/{}", "work/*/*/{}")
"""Locations of an evaluation: in a run, in a download, in the output of a local run."""


@click.command("report")
@click.argument("folder", type=click.Path(path_type=Path), metavar="FOLDER")
@click.option("--split", default="val", help="The evaluated split.")
@click.option(
    *("--output", "-o"),
    type=click.Path(path_type=Path),
    help="File to write.  [default: report.html of the evaluation]",
)
def report(folder: Path, split: str, output: Path | None) -> None:
    """Write the report of a run: one HTML file, with the verdict and the exported model.

    FOLDER is the output of `run --local` or `download`, the folder of a run, or that of an
    evaluation. Of several evaluations the newest is used.

    kfp-ddp report run-output/latest
    """
    from kfp_ddp import report
    from kfp_ddp.core.run_folder import REPORT

    evaluation = _newest_evaluation(folder, split)
    bundle = evaluation.parent / "bundle"
    target = output or evaluation / REPORT
    document = report.html(evaluation, bundle if bundle.is_dir() else None)
    with writing(target):
        if output is None:
            target.unlink(missing_ok=True)  # the run may be a stranger's, and this a link
        target.write_text(document, encoding="utf-8")
    echo(target)


def _newest_evaluation(folder: Path, split: str) -> Path:
    """Return the folder of the newest evaluation; raise InputError if there is none."""
    from kfp_ddp.core.files import newest_file
    from kfp_ddp.core.run_folder import RunFolder
    from kfp_ddp.models.evaluation import FILE

    if (folder / FILE).is_file():
        return folder
    name = RunFolder.evaluation_name(split)
    newest = newest_file(folder, (f"{one.format(name)}/{FILE}" for one in PATTERNS))
    if newest is None:
        raise InputError(
            f"{folder} contains no evaluation of {split}: name the output of run --local or of "
            "download, or the folder of a run whose evaluate step has ended"
        )
    return newest.parent
