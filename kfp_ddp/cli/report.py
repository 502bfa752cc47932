"""`kfp-ddp report`: the report of a run, from its folder."""

from pathlib import Path

import click

from kfp_ddp.cli.options import echo, writing
from kfp_ddp.core.errors import InputError

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
def command(folder: Path, split: str, output: Path | None) -> None:
    """Write the report of a run: one HTML file, with the verdict and the exported model.

    FOLDER is the output of `run --local` or `download`, the folder of a run, or that of an
    evaluation. Of several evaluations the newest is used.

    kfp-ddp report run-output/latest
    """
    from kfp_ddp import report
    from kfp_ddp.core.run_folder import REPORT

    evaluation = _evaluation(folder, split)
    bundle = evaluation.parent / "bundle"
    target = output or evaluation / REPORT
    document = report.html(evaluation, bundle if bundle.is_dir() else None)
    with writing(target):
        target.write_text(document, encoding="utf-8")
    echo(target)


def _evaluation(folder: Path, split: str) -> Path:
    """Return the folder of the newest evaluation; raise InputError if there is none."""
    from kfp_ddp.core.run_folder import RunFolder
    from kfp_ddp.models.evaluation import FILE

    if (folder / FILE).is_file():
        return folder
    name = RunFolder.evaluation_name(split)
    files = [file for one in PATTERNS for file in folder.glob(f"{one.format(name)}/{FILE}")]
    if not files:
        raise InputError(
            f"{folder} contains no evaluation of {split}: name the output of run --local or of "
            "download, or the folder of a run whose evaluate step has ended"
        )
    return max(files, key=lambda path: path.stat().st_mtime).parent
