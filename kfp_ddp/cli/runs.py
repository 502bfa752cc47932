"""`kfp-ddp runs`, `status`, `cancel` and `retry`: runs on a KFP server."""

from pathlib import Path

import click

from kfp_ddp.cli.options import AS_JSON, connected, echo, echo_json, text_option
from kfp_ddp.client.connection import open_client
from kfp_ddp.client.runs import (
    RETRYABLE,
    document,
    ended,
    find_run,
    list_runs,
    shown_state,
    spec_of,
    started,
)
from kfp_ddp.core.config import Connection
from kfp_ddp.core.errors import InputError, JobError
from kfp_ddp.core.text import printable


@click.command("runs")
@text_option("--experiment", help="Only runs of this experiment.")
@text_option("--state", help="Only runs in this state, such as failed or running.")
@click.option("--most", type=click.IntRange(1), default=20, help="Maximum number of runs.")
@AS_JSON
@connected
def runs(connection: Connection, experiment: str, state: str, most: int, as_json: bool) -> None:
    """List the runs, the newest first. Other commands accept the start of an id.

    kfp-ddp runs --state failed
    """
    with open_client(connection) as client:
        rows = list_runs(client, most, experiment, state)
    if as_json:
        echo_json([document(run, connection) for run in rows])
        return
    if not rows:
        echo("no runs", err=True)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from kfp_ddp.client.follow import MARKS, duration

    table = Table("", "id", "name", "state", "started", "duration", box=None, pad_edge=False)
    for run in rows:
        state = shown_state(run)
        mark, colour, _ = MARKS.get(state, MARKS["RUNNING"])
        start = started(run)
        table.add_row(
            f"[{colour}]{mark}[/]",
            run.run_id[:8],
            Text(printable(run.display_name)),
            state.lower(),
            f"{start.astimezone():%Y-%m-%d %H:%M}" if start else "",
            duration(start, ended(run)),
        )
    Console().print(table)


@click.command("status")
@click.argument("run")
@click.option(
    *("--follow", "--watch", "watch"),
    is_flag=True,
    help="Show its steps until it ends; exit code 1 if it failed.",
)
@AS_JSON
@connected
def status(connection: Connection, run: str, watch: bool, as_json: bool) -> None:
    """Show the steps of RUN and the progress of its training.

    RUN is an id or the start of one, a name, `last`, or the folder of a run with --local. The exit
    code is 0 whatever the state of the run is, and with --follow 1 unless it succeeded.

    kfp-ddp status last --follow
    """
    if Path(run).is_dir():
        _show_local(Path(run), watch, as_json)
        return
    from kfp_ddp.client.follow import Cluster, check_success, tree, until_over
    from kfp_ddp.client.steps import documents, steps_of

    with open_client(connection) as client:
        current = find_run(client, run)
        if watch:
            current = until_over(client, connection, current.run_id, to_stderr=as_json)
        cluster = Cluster(client, connection, current.run_id)
        steps = steps_of(current, spec_of(client, current), cluster.nodes())
    if as_json:
        echo_json({**document(current, connection), "steps": documents(steps, cluster.progress)})
    elif not watch:
        from rich.console import Console

        Console().print(tree(current, steps, cluster.progress))
        echo(connection.run_page(current.run_id) or current.run_id)
    if watch:
        check_success(current)


def _show_local(folder: Path, watch: bool, as_json: bool) -> None:
    """Show a run of this machine; following one that runs is left to its own terminal."""
    from kfp_ddp.client.follow import duration, tree_of
    from kfp_ddp.client.run_info import local_run
    from kfp_ddp.client.steps import documents
    from kfp_ddp.local.results import Progress

    info = local_run(folder)
    progress = Progress(folder)
    if as_json:
        head = {"run_id": info.id, "name": info.name, "state": info.state, "folder": str(folder)}
        echo_json({**head, "steps": documents(info.steps)})
    else:
        from rich.console import Console

        console, time = Console(), duration(info.start, info.end)
        line = progress.line(console.width - 30)
        about = (info.name, info.id, info.state, time, info.steps)
        console.print(tree_of(*about, lambda step: line if step.name == "train" else ""))
    if watch and info.state != "SUCCEEDED":
        raise JobError(f"{info.name} is {info.state}: see kfp-ddp describe {folder}")


@click.command("cancel")
@click.argument("run")
@click.option("--wait", is_flag=True, help="Wait until it is over.")
@AS_JSON
@connected
def cancel(connection: Connection, run: str, wait: bool, as_json: bool) -> None:
    """Cancel RUN: its job is deleted, its checkpoints remain, and `retry` resumes from them.

    RUN is an id or the start of one, a name, or last.
    """
    from kfp_ddp.client.follow import until_over
    from kfp_ddp.client.steps import OVER

    with open_client(connection) as client:
        current = find_run(client, run)
        if current.state in OVER:
            raise InputError(f"{current.display_name} is already over ({current.state})")
        client.terminate_run(current.run_id)
        echo(f"cancelling {current.display_name}", err=as_json)
        if wait:
            current = until_over(client, connection, current.run_id, silent=True)
            echo("it is over", err=as_json)
        elif as_json:
            current = client.get_run(current.run_id)
    if as_json:
        echo_json(document(current, connection))


@click.command("retry")
@click.argument("run")
@click.option(
    "--follow", is_flag=True, help="Show its steps until it ends; exit code 1 if it failed again."
)
@AS_JSON
@connected
def retry(connection: Connection, run: str, follow: bool, as_json: bool) -> None:
    """Resume RUN, which failed or was cancelled, without repeating completed steps.

    A training resumes from its newest checkpoint. KFP does not repeat an exit handler, so the
    teardown of the next run cleans up after this one.

    RUN is an id or the start of one, a name, or last.
    """
    from kfp_ddp.client.follow import check_success, until_over

    with open_client(connection) as client:
        current = find_run(client, run)
        if current.state not in RETRYABLE:
            raise InputError(
                f"{current.display_name} is {current.state}: only a run that failed or was "
                "cancelled can be retried"
            )
        client.run_service.run_service_retry_run(current.run_id)
        page = connection.run_page(current.run_id) or current.run_id
        echo(f"{current.display_name} resumes: {page}", err=as_json)
        if follow:
            current = until_over(client, connection, current.run_id, to_stderr=as_json)
        elif as_json:
            current = client.get_run(current.run_id)
    if as_json:
        echo_json(document(current, connection))
    if follow:
        check_success(current)
