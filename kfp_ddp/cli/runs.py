"""`kfp-ddp runs`: the runs of a server."""

import click

from kfp_ddp.cli.options import AS_JSON, connected, echo_json
from kfp_ddp.core.config import Connection


@click.command("runs")
@click.option("--experiment", default="", help="Only those of this experiment.")
@click.option("--state", default="", help="Only those in this state, such as failed or running.")
@click.option("--most", type=click.IntRange(1), default=20, show_default=True, help="Runs to list.")
@AS_JSON
@connected
def command(connection: Connection, experiment: str, state: str, most: int, as_json: bool) -> None:
    """List the runs, the newest first: the first characters of an id name one.

    kfp-ddp runs --state failed
    """
    from kfp_ddp.client import runs
    from kfp_ddp.client.connection import open_client

    with open_client(connection) as client:
        found = runs.listed(client, most, experiment, state)
    if as_json:
        echo_json([runs.document(run, connection) for run in found])
        return
    if not found:
        click.echo("no runs", err=True)
        return
    from rich.console import Console
    from rich.table import Table

    from kfp_ddp.client.follow import MARKS, lasted

    table = Table("", "id", "name", "state", "began", "took", box=None, pad_edge=False)
    for run in found:
        mark, colour = MARKS.get(run.state or "PENDING", MARKS["RUNNING"])
        began, over = runs.started(run), runs.ended(run)
        table.add_row(
            f"[{colour}]{mark}[/]",
            run.run_id[:8],
            run.display_name,
            (run.state or "PENDING").lower(),
            f"{began.astimezone():%Y-%m-%d %H:%M}" if began else "",
            lasted(began, over),
        )
    Console().print(table)
