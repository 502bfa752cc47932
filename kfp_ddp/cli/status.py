"""`kfp-ddp status`: the steps of a run."""

import click

from kfp_ddp.cli.options import AS_JSON, connected, echo_json
from kfp_ddp.core.config import Connection


@click.command("status")
@click.argument("run")
@click.option(
    *("--follow", "--watch", "watch"),
    is_flag=True,
    help="Show its steps until it ends; exit code 1 if it failed.",
)
@AS_JSON
@connected
def command(connection: Connection, run: str, watch: bool, as_json: bool) -> None:
    """Show the steps of RUN, and how far its training is.

    RUN is an id or the first characters of one, a name, or last.

    kfp-ddp status last --follow
    """
    from kfp_ddp.client import runs
    from kfp_ddp.client.connection import open_client
    from kfp_ddp.client.follow import check_success, tree, until_over
    from kfp_ddp.client.progress import Progress
    from kfp_ddp.client.steps import documents, steps_of

    with open_client(connection) as client:
        found = runs.find_run(client, run)
        if watch:
            found = until_over(client, connection, found.run_id, aside=as_json)
        steps = steps_of(found, runs.spec_of(client, found))
    progress = Progress(connection, found.run_id)
    if as_json:
        told = runs.document(found, connection)
        echo_json({**told, "steps": documents(steps, progress)})
    elif not watch:
        from rich.console import Console

        Console().print(tree(found, steps, progress))
        click.echo(connection.run_page(found.run_id) or found.run_id)
    if watch:
        check_success(found)
