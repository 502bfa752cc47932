"""`kfp-ddp report`: the report of a run, made anew from its folder."""

from pathlib import Path

import click

PLACES = ("{}", "*/{}", "work/*/*/{}")
"""Where an evaluation lies: below a run, below what was downloaded, below the output of a run."""


@click.command("report")
@click.argument("folder", type=click.Path(path_type=Path), metavar="FOLDER")
@click.option("--split", default="val", show_default=True, help="The split evaluated.")
@click.option(
    *("--output", "-o"),
    type=click.Path(path_type=Path),
    help="File to write.  [default: report.html beside it]",
)
def command(folder: Path, split: str, output: Path | None) -> None:
    """Make the report of a run anew: one HTML file, with the verdict and the exported model.

    FOLDER is what `run --local` or `download` wrote, the folder of a run, or that of an evaluation.
    Of several the newest is taken.

    kfp-ddp report run-output
    """
    from kfp_ddp import report
    from kfp_ddp.core.errors import StorageError
    from kfp_ddp.core.run_folder import REPORT

    place = _evaluation(folder, split)
    bundle = place.parent / "bundle"
    target = output or place / REPORT
    document = report.html(place, bundle if bundle.is_dir() else None)
    try:
        target.write_text(document, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{target} cannot be written: {error.strerror}") from None
    click.echo(target)


def _evaluation(folder: Path, split: str) -> Path:
    """The folder of the newest evaluation.

    Raises:
        InputError: there is none.
    """
    from kfp_ddp.core.errors import InputError
    from kfp_ddp.core.run_folder import RunFolder
    from kfp_ddp.models.evaluation import FILE

    if (folder / FILE).is_file():
        return folder
    name = RunFolder.evaluation_name(split)
    found = [path for place in PLACES for path in folder.glob(f"{place.format(name)}/{FILE}")]
    if not found:
        raise InputError(
            f"{folder} holds no evaluation of {split}: name the output of run --local or of "
            "download, or the folder of a run whose evaluate step has ended"
        )
    return max(found, key=lambda path: path.stat().st_mtime).parent
