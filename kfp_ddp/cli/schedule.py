"""`kfp-ddp schedule`: recurring runs."""

from typing import Any

import click

from kfp_ddp.cli.options import (
    AS_JSON,
    SET,
    SETTINGS_FILE,
    added,
    configured,
    connected,
    echo,
    echo_json,
    inputs,
    is_on_command_line,
    opened,
    show,
)
from kfp_ddp.client import schedules
from kfp_ddp.client.schedules import RUN_SETTINGS, TIMES
from kfp_ddp.core.config import Connection

TIMING = added(
    click.option("--cron", help="Minute, hour, day, month, weekday, such as '0 3 * * *'."),
    click.option("--pipeline", help="Uploaded pipeline, as NAME or NAME@VERSION."),
    click.option(
        "--latest/--pinned",
        default=None,
        help="Run the pipeline's newest version each time, or the current one.",
    ),
    SET,
    SETTINGS_FILE,
    click.option("--start", help="No runs before this time, such as 2027-01-31T03:00."),
    click.option("--end", help="No runs after this time; never: without end."),
    click.option(
        "--catchup/--no-catchup",
        default=None,
        help="After a pause, start one run for each missed time, or one for all.",
    ),
    click.option(
        "--max-concurrency",
        type=click.IntRange(1, 10),
        help="Maximum number of parallel runs; further runs wait.",
    ),
    AS_JSON,
    configured("time_zone", *RUN_SETTINGS),
)


@click.group("schedule")
def command() -> None:
    """Run a pipeline periodically, at the times of a cron of five fields.

    \b
    kfp-ddp schedule create nightly --pipeline retrain --cron '0 3 * * *' \\
        --set source=gs://bucket/flowers --set destination=gs://bucket/models
    """


@command.command("create")
@click.argument("name")
@click.option("--paused", is_flag=True, help="Start no runs until `resume`.")
@configured("experiment", "destination")
@TIMING
@connected
def create(connection: Connection, name: str, paused: bool, as_json: bool, **options: Any) -> None:
    """Create the schedule NAME of an uploaded pipeline (kfp-ddp upload); its input is checked.

    By default it always runs the current version (--pinned), one run at a time, and one for all
    times that it missed (--no-catchup).
    """
    configured_ = ("experiment", "destination", "time_zone", *RUN_SETTINGS)
    with opened(connection, **{one: options[one] for one in configured_}) as client:
        timing = {one: options[one] for one in TIMES}
        given = inputs(options)
        content = client.schedules.create(name, paused=paused, inputs=given, **timing)
        if client.finder.client.new_experiment not in ("", "Default"):
            echo(f"the experiment {client.finder.client.new_experiment} is new", err=True)
        for note in content.pop("notes"):
            echo(f"! {name} {note}", err=True)
        _print(content, as_json)


@command.command("replace")
@click.argument("schedule")
@click.option("--unset", multiple=True, metavar="KEY", help="A parameter to reset to its default.")
@TIMING
@connected
def replace(
    connection: Connection, schedule: str, unset: tuple[str, ...], as_json: bool, **options: Any
) -> None:
    """Change SCHEDULE: a new one of the same name replaces it; other settings are copied.

    KFP cannot change a schedule, and ends the active run of one that is deleted. So the new one is
    created first, and the old one is paused. It is deleted when it has no active run, else by the
    next `replace`, or by `delete`. The two are never enabled at the same time.
    """
    timing = {one: options[one] for one in TIMES}
    # A configured default is not a change.
    timing |= {one: options[one] for one in RUN_SETTINGS if is_on_command_line(one)}
    with opened(connection, time_zone=options["time_zone"]) as client:
        content = client.schedules.replace(schedule, unset=unset, inputs=inputs(options), **timing)
        for one in content.pop("remaining"):
            echo(
                f"the old schedule ({one[:8]}) is paused and remains until its "
                f"run is over: kfp-ddp schedule delete {one[:8]} --wait",
                err=True,
            )
        _print(content, as_json)


@command.command("list")
@AS_JSON
@configured("time_zone")
@connected
def list_(connection: Connection, time_zone: str, as_json: bool) -> None:
    """List the schedules, the newest first."""
    with opened(connection, time_zone=time_zone) as client:
        rows = client.schedules.all()
    if as_json:
        echo_json(rows)
        return
    if not rows:
        echo("no schedules", err=True)
        return
    header = f"next ({time_zone})"
    width = max(16, len(header))
    echo(f"{'id':8}  {'state':7}  {header:{width}}  name")
    for row in rows:
        soon = schedules.minute(row["next"][0]) if row["next"] else ""
        echo(f"{row['id'][:8]}  {row['state']:7}  {soon:{width}}  {row['name']}")
        echo(f"          {row['when']}: {row['pipeline']}")
    for row in rows:
        if row["warning"]:
            echo(f"! {row['name']}: {row['warning']}", err=True)


@command.command("show")
@click.argument("schedule")
@AS_JSON
@configured("time_zone")
@connected
def show_(connection: Connection, schedule: str, time_zone: str, as_json: bool) -> None:
    """Show SCHEDULE, a name or id: its cron as text, its next times, its last runs."""
    with opened(connection, time_zone=time_zone) as client:
        _print(client.schedules.get(schedule), as_json)


@command.command("pause")
@click.argument("schedule")
@AS_JSON
@connected
def pause(connection: Connection, schedule: str, as_json: bool) -> None:
    """Pause SCHEDULE until `resume`; active runs continue."""
    with opened(connection) as client:
        _print(client.schedules.pause(schedule), as_json)


@command.command("resume")
@click.argument("schedule")
@AS_JSON
@connected
def resume(connection: Connection, schedule: str, as_json: bool) -> None:
    """Resume the paused SCHEDULE."""
    with opened(connection) as client:
        _print(client.schedules.resume(schedule), as_json)


@command.command("run-now")
@click.argument("schedule")
@AS_JSON
@connected
def run_now(connection: Connection, schedule: str, as_json: bool) -> None:
    """Start an additional run of SCHEDULE now; the schedule does not change."""
    with opened(connection) as client:
        info = client.schedules.run_now(schedule).info
    started = f"started {info.name}: {info.page or info.id}"
    show(as_json, info.document(), started, f"progress: kfp-ddp status {info.word} --follow")


@command.command("delete")
@click.argument("schedule")
@click.option("--wait", is_flag=True, help="Pause it, and delete it when its runs are over.")
@click.option("--force", is_flag=True, help="Also end its active runs.")
@AS_JSON
@connected
def delete(connection: Connection, schedule: str, wait: bool, force: bool, as_json: bool) -> None:
    """Delete SCHEDULE; refused while a run of it is active, since KFP would end that run."""
    with opened(connection) as client:
        done = client.schedules.delete(schedule, wait, force)
    show(as_json, done, f"deleted {done['name']} ({done['deleted'][:8]})")


def _print(content: dict[str, Any], as_json: bool) -> None:
    title = f"{content['name']} ({content['id'][:8]}) is {content['state']}"
    rows = (f"  {label:14}{text}" for label, text in schedules.rows(content))
    show(as_json, content, title, *rows)
    if content["warning"] and not as_json:
        echo(f"! {content['warning']}", err=True)
