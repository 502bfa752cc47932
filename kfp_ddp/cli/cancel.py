"""`kfp-ddp cancel`: a run is ended, and its job with it."""

import click

from kfp_ddp.cli.options import AS_JSON, connected, echo_json
from kfp_ddp.core.config import Connection


@click.command("cancel")
@click.argument("run")
@click.option("--wait", is_flag=True, help="Wait until it is over.")
@AS_JSON
@connected
def command(connection: Connection, run: str, wait: bool, as_json: bool) -> None:
    """End RUN: its job is deleted, its checkpoints stay, and retry goes on from them.

    RUN is an id or the first characters of one, a name, or last.
    """
    from kfp_ddp.client import runs
    from kfp_ddp.client.connection import open_client
    from kfp_ddp.client.follow import until_over
    from kfp_ddp.client.steps import OVER
    from kfp_ddp.core.errors import InputError

    with open_client(connection) as client:
        found = runs.find_run(client, run)
        if found.state in OVER:
            raise InputError(f"{found.display_name} is over ({found.state}): nothing to end")
        client.terminate_run(found.run_id)
        click.echo(f"{found.display_name} is being ended", err=as_json)
        if wait:
            found = until_over(client, connection, found.run_id, silent=True)
            click.echo("it is over", err=as_json)
        elif as_json:
            found = client.get_run(found.run_id)
    if as_json:
        echo_json(runs.document(found, connection))
