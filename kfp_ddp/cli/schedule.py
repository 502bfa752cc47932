"""`kfp-ddp schedule`: recurring runs."""

from typing import TYPE_CHECKING, Any

import click

from kfp_ddp.cli.options import (
    AS_JSON,
    SET,
    SETTINGS_FILE,
    added,
    configured,
    echo,
    echo_json,
    inputs,
    is_on_command_line,
    served,
    show,
    with_client,
)
from kfp_ddp.client.kfp import schedules
from kfp_ddp.client.kfp.schedules import RUN_SETTINGS, TIMES

if TYPE_CHECKING:
    from kfp_ddp.client.api import Client

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
@with_client
def create(client: "Client", name: str, paused: bool, as_json: bool, **options: Any) -> None:
    """Create the schedule NAME of an uploaded pipeline (kfp-ddp upload); its input is checked.

    By default it always runs the current version (--pinned), one run at a time, and one for all
    times that it missed (--no-catchup).
    """
    timing = {one: options[one] for one in TIMES}
    content = client.schedules.create(name, paused=paused, inputs=inputs(options), **timing)
    if client.finder.client.new_experiment not in ("", "Default"):
        echo(f"the experiment {client.finder.client.new_experiment} is new", err=True)
    for note in content.pop("notes"):
        echo(f"! {name} {note}", err=True)
    _print(content, as_json)


@command.command("replace")
@click.argument("schedule")
@click.option("--unset", multiple=True, metavar="KEY", help="A parameter to reset to its default.")
@TIMING
@with_client
def replace(
    client: "Client", schedule: str, unset: tuple[str, ...], as_json: bool, **options: Any
) -> None:
    """Change SCHEDULE: a new one of the same name replaces it; other settings are copied.

    KFP cannot change a schedule, and ends the active run of one that is deleted. So the new one is
    created first, and the old one is paused. It is deleted when it has no active run, else by the
    next `replace`, or by `delete`. The two are never enabled at the same time.
    """
    timing = {one: options[one] for one in TIMES}
    # A configured default is not a change.
    timing |= {one: options[one] for one in RUN_SETTINGS if is_on_command_line(one)}
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
@with_client
def list_(client: "Client", time_zone: str, as_json: bool) -> None:
    """List the schedules, the newest first."""
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
@with_client
def show_(client: "Client", schedule: str, as_json: bool, **_: str) -> None:
    """Show SCHEDULE, a name or id: its cron as text, its next times, its last runs."""
    _print(client.schedules.get(schedule), as_json)


@command.command("pause")
@click.argument("schedule")
@served
def pause(client: "Client", schedule: str, as_json: bool) -> None:
    """Pause SCHEDULE until `resume`; active runs continue."""
    _print(client.schedules.pause(schedule), as_json)


@command.command("resume")
@click.argument("schedule")
@served
def resume(client: "Client", schedule: str, as_json: bool) -> None:
    """Resume the paused SCHEDULE."""
    _print(client.schedules.resume(schedule), as_json)


@command.command("run-now")
@click.argument("schedule")
@served
def run_now(client: "Client", schedule: str, as_json: bool) -> None:
    """Start an additional run of SCHEDULE now; the schedule does not change."""
    info = client.schedules.run_now(schedule).info
    started = f"started {info.name}: {info.page or info.id}"
    show(as_json, info.document(), started, f"progress: kfp-ddp status {info.word} --follow")


@command.command("delete")
@click.argument("schedule")
@click.option("--wait", is_flag=True, help="Pause it, and delete it when its runs are over.")
@click.option("--force", is_flag=True, help="Also end its active runs.")
@served
def delete(client: "Client", schedule: str, wait: bool, force: bool, as_json: bool) -> None:
    """Delete SCHEDULE; refused while a run of it is active, since KFP would end that run."""
    done = client.schedules.delete(schedule, wait, force)
    show(as_json, done, f"deleted {done['name']} ({done['deleted'][:8]})")


def _print(content: dict[str, Any], as_json: bool) -> None:
    title = f"{content['name']} ({content['id'][:8]}) is {content['state']}"
    rows = (f"  {label:14}{text}" for label, text in schedules.rows(content))
    show(as_json, content, title, *rows)
    if content["warning"] and not as_json:
        echo(f"! {content['warning']}", err=True)
