"""`kfp-ddp retry`: a run that failed goes on."""

import click

from kfp_ddp.cli.options import AS_JSON, connected, echo_json
from kfp_ddp.core.config import Connection


@click.command("retry")
@click.argument("run")
@click.option(
    "--follow", is_flag=True, help="Show its steps until it ends; exit code 1 if it failed again."
)
@AS_JSON
@connected
def command(connection: Connection, run: str, follow: bool, as_json: bool) -> None:
    """Let RUN go on, which failed or was ended: what is done stays done.

    A training goes on from its newest checkpoint. What teardown would delete at the end of the
    run, that of the next run does: KFP does not repeat an exit handler.

    RUN is an id or the first characters of one, a name, or last.
    """
    from kfp_ddp.client import runs
    from kfp_ddp.client.connection import open_client
    from kfp_ddp.client.follow import check_success, until_over
    from kfp_ddp.core.errors import InputError

    with open_client(connection) as client:
        found = runs.find_run(client, run)
        if found.state not in runs.CAN_GO_ON:
            doing = "succeeded" if found.state == "SUCCEEDED" else f"is {found.state}"
            only = "only a run that failed or was ended can go on"
            raise InputError(f"{found.display_name} {doing}: {only}")
        client._run_api.run_service_retry_run(found.run_id)
        page = connection.run_page(found.run_id) or found.run_id
        click.echo(f"{found.display_name} goes on: {page}", err=as_json)
        if follow:
            found = until_over(client, connection, found.run_id, aside=as_json)
        elif as_json:
            found = client.get_run(found.run_id)
    if as_json:
        echo_json(runs.document(found, connection))
    if follow:
        check_success(found)
