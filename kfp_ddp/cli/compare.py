"""`kfp-ddp compare`: several runs in one table."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kfp_ddp.cli.options import AS_JSON, FILE, connected, echo, echo_json, writing
from kfp_ddp.core.errors import InputError
from kfp_ddp.core.text import printable

if TYPE_CHECKING:
    from kfp_ddp.client.comparison import Comparison
    from kfp_ddp.core.config import Connection


@click.command("compare")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option(
    "--html", type=FILE, help="Also write a page with the tables and the curves of all runs."
)
@AS_JSON
@connected
def command(
    runs: tuple[str, ...], html: Path | None, as_json: bool, connection: "Connection"
) -> None:
    """Compare RUNs: settings that differ, metrics with 95 % confidence intervals.

    A RUN is an id or the start of one, a name, `last`, or the folder of a run with --local. Each
    training of a run has its own column.

    kfp-ddp compare last 8fa2b9a1 ./photos-model --html compared.html
    """
    from kfp_ddp.client.comparison import compare, to_html
    from kfp_ddp.client.run_info import run_finder
    from kfp_ddp.client.trainings import read_trainings

    with run_finder(connection) as finder, tempfile.TemporaryDirectory() as scratch:
        infos = [finder.find(word) for word in runs]
        rows = [
            (info, read_trainings(info.files(), Path(scratch, str(number))))
            for number, info in enumerate(infos)
        ]
    for info, trainings in rows:
        if not trainings:
            raise InputError(
                f"{info.name} has no training to compare: see kfp-ddp describe {info.word}"
            )
    compared = compare(rows)
    if html is not None:
        with writing(html):
            html.write_text(to_html(compared), encoding="utf-8")
    if as_json:
        echo_json(compared.document())
    else:
        _print(compared)
        if html is not None:
            echo(f"curves: {html}")


def _print(compared: "Comparison") -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from kfp_ddp.client.comparison import setting_text

    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 3, 0, 0))
    rows = [
        ("", [side.letter for side in compared.sides]),
        ("run", [side.name for side in compared.sides]),
        ("id", [side.run.id[:8] for side in compared.sides]),
        ("state", [side.run.state for side in compared.sides]),
        ("", []),
        *((metric.name.replace("_", " "), metric.texts()) for metric in compared.metrics),
        ("", []),
        *(
            (name, [setting_text(value) for value in row])
            for name, row in compared.settings.items()
        ),
    ]
    for name, cells in rows:
        table.add_row(*(Text(printable(cell)) for cell in (name, *cells)))
    # Lines are not wrapped in a file or pipe.
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=10_000)
    console.print(table, "")
    if not compared.settings:
        echo("All settings are equal.")
    for note in compared.notes:
        echo(f"{note}.")
