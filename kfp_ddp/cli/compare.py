"""`kfp-ddp compare`: runs side by side."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from kfp_ddp.cli.options import AS_JSON, connected, echo_json

if TYPE_CHECKING:
    from kfp_ddp.client.inspection.comparison import Comparison
    from kfp_ddp.core.config import Connection


@click.command("compare")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option(
    "--html",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write a page with the tables and the curves of all runs here, too.",
)
@AS_JSON
@connected
def command(
    runs: tuple[str, ...], html: Path | None, as_json: bool, connection: "Connection"
) -> None:
    """Set RUNs side by side: settings that differ, metrics with their 95 % intervals.

    A RUN is its id or the first characters of it, its name, `last`, or the folder of a run with
    --local. Each training of a run has a column of its own.

    kfp-ddp compare last 8fa2b9a1 ./photos-model --html compared.html
    """
    import tempfile

    from kfp_ddp.client.inspection import subjects
    from kfp_ddp.client.inspection.comparison import compare
    from kfp_ddp.client.inspection.comparison_page import to_html
    from kfp_ddp.client.inspection.trainings import trainings
    from kfp_ddp.core.errors import InputError

    with subjects(connection) as known, tempfile.TemporaryDirectory() as scratch:
        found = [known.find(word) for word in runs]
        folders = [Path(scratch, str(number)) for number in range(len(found))]
        read = [
            (each, trainings(each.files(), folder))
            for each, folder in zip(found, folders, strict=True)
        ]
    for subject, each in read:
        if not each:
            raise InputError(
                f"{subject.name} left no training to compare: see kfp-ddp describe {subject.word}"
            )
    compared = compare(read)
    if html is not None:
        _write(html, to_html(compared))
    if as_json:
        echo_json(compared.document())
    else:
        _print(compared)
        if html is not None:
            click.echo(f"\nwith their curves: {html}")


def _write(path: Path, text: str) -> None:
    from kfp_ddp.core.errors import StorageError, full

    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(full(error, path)) from None


def _print(compared: "Comparison") -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from kfp_ddp.client.inspection.comparison import shown
    from kfp_ddp.core.text import printable

    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 3, 0, 0))
    rows = [
        ("", [side.letter for side in compared.sides]),
        ("run", [side.name for side in compared.sides]),
        ("id", [side.run_id[:8] for side in compared.sides]),
        ("state", [side.state for side in compared.sides]),
        ("", []),
        *((metric.name.replace("_", " "), metric.texts()) for metric in compared.metrics),
        ("", []),
        *((name, [shown(each) for each in row]) for name, row in compared.settings.items()),
    ]
    for name, cells in rows:
        table.add_row(*(Text(printable(each)) for each in (name, *cells)))
    # Where nobody looks at a terminal, a line is as long as it is.
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=10_000)
    console.print(table)
    if not compared.settings:
        click.echo("\nAll were set alike.")
    for note in compared.notes:
        click.echo(f"\n{note}.")
