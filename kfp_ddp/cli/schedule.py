"""`kfp-ddp schedule`: recurring runs."""

import dataclasses
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Any

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
    show,
)
from kfp_ddp.client import cron, schedules
from kfp_ddp.client.connection import open_client
from kfp_ddp.core.config import Connection, chosen
from kfp_ddp.core.errors import InputError
from kfp_ddp.core.images import PUBLIC

if TYPE_CHECKING:
    from kfp_server_api import V2beta1RecurringRun

    from kfp_ddp.client.compat import Client

RUN_SETTINGS = ("pipeline_root", "service_account")
NEVER = "never"
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
    click.option("--end", help=f"No runs after this time; {NEVER}: without end."),
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
    from kfp_ddp.client import scheduling, submission

    for required in ("cron", "pipeline"):
        if not options[required]:
            raise InputError(f"--{required} is missing: a schedule needs a time and a pipeline")
    settings = _settings(options)
    submission.check_secrets({"name": name, "experiment": options["experiment"], **settings})
    with open_client(connection) as client:
        pipeline, version = submission.uploaded(client, options["pipeline"])
        submission.check_images(pipeline, chosen("registry")["registry"])
        words, boxes = inputs(pipeline, options)
        plan = schedules.SchedulePlan(
            name=name,
            pipeline_id=version.pipeline_id,
            version_id="" if options["latest"] else version.version_id,
            arguments=submission.arguments(pipeline, options["file"], words, boxes),
            enabled=not paused,
            **settings,
        )
        scheduling.check(plan, cron.zone(options["time_zone"]), datetime.now(UTC))
        created = scheduling.create(client, plan, options["experiment"])
        if client.new_experiment not in ("", "Default"):
            echo(f"the experiment {client.new_experiment} is new", err=True)
        if warning := cron.often(plan.cron):
            echo(f"! {name} {warning}", err=True)
        if {*PUBLIC.values()} & {*pipeline.images()}:
            echo(
                f"! {name} installs packages in each step: build images, and set registry", err=True
            )
        _print(client, created, options["time_zone"], as_json)


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
    from kfp_ddp.client import scheduling, submission

    settings = _settings(options)
    for name in RUN_SETTINGS:  # a configured default is not a change
        if not is_on_command_line(name):
            settings.pop(name, None)
    with open_client(connection) as client:
        old = schedules.find(client, schedule)
        scheduling.check_state(client, old, schedule)
        before = schedules.plan_of(old, datetime.now(UTC))
        if not (before.cron or options["cron"]):
            raise InputError(f"{before.name} has no valid cron to copy: give --cron")
        name, latest = options["pipeline"] or "", options["latest"]
        if latest is None:
            latest = not before.version_id and "@" not in name
        if not name:
            unpinned = options["latest"] is not None
            plan = dataclasses.replace(before, version_id="") if unpinned else before
            name = schedules.version_of(client, plan)
        pipeline, version = submission.uploaded(client, name)
        plan = dataclasses.replace(
            before,
            pipeline_id=version.pipeline_id,
            version_id="" if latest else version.version_id,
            arguments=scheduling.changed(
                pipeline, before.arguments, options["file"], options["words"], unset
            ),
            **settings,
        )
        scheduling.check(plan, cron.zone(options["time_zone"]), datetime.now(UTC))
        new, remaining = scheduling.replace_by(client, old, plan)
        for one in remaining:
            echo(
                f"the old schedule ({one.recurring_run_id[:8]}) is paused and remains until its "
                f"run is over: kfp-ddp schedule delete {one.recurring_run_id[:8]} --wait",
                err=True,
            )
        _print(client, new, options["time_zone"], as_json)


@command.command("list")
@AS_JSON
@configured("time_zone")
@connected
def list_(connection: Connection, time_zone: str, as_json: bool) -> None:
    """List the schedules, the newest first."""
    with open_client(connection) as client:
        names: dict[tuple[str, str], str] = {}
        every = schedules.list_all(client)
        rows = [schedules.document(client, one, time_zone, names) for one in every]
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
    from kfp_ddp.client.run_info import info_of

    with open_client(connection) as client:
        current = schedules.find(client, schedule)
        last = islice(schedules.runs_of(client, current), 5)
        documents = [info_of(run, connection).document() for run in last]
        _print(client, current, time_zone, as_json, runs=documents)


@command.command("pause")
@click.argument("schedule")
@AS_JSON
@connected
def pause(connection: Connection, schedule: str, as_json: bool) -> None:
    """Pause SCHEDULE until `resume`; active runs continue."""
    _switch(connection, schedule, "disable_recurring_run", as_json)


@command.command("resume")
@click.argument("schedule")
@AS_JSON
@connected
def resume(connection: Connection, schedule: str, as_json: bool) -> None:
    """Resume the paused SCHEDULE."""
    _switch(connection, schedule, "enable_recurring_run", as_json)


@command.command("run-now")
@click.argument("schedule")
@AS_JSON
@connected
def run_now(connection: Connection, schedule: str, as_json: bool) -> None:
    """Start an additional run of SCHEDULE now; the schedule does not change."""
    from kfp_ddp.client import scheduling
    from kfp_ddp.client.run_info import info_of

    with open_client(connection) as client:
        run = scheduling.start_now(client, schedules.find(client, schedule))
    info = info_of(run, connection)
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
    from kfp_ddp.client import scheduling

    if wait and force:
        raise InputError("--wait and --force exclude each other: give one of them")
    with open_client(connection) as client:
        current = schedules.find(client, schedule)
        scheduling.delete(client, current, wait, force)
    name, identity = current.display_name, current.recurring_run_id
    show(as_json, {"deleted": identity, "name": name}, f"deleted {name} ({identity[:8]})")


def _switch(connection: Connection, word: str, method: str, as_json: bool) -> None:
    with open_client(connection) as client:
        schedule = schedules.find(client, word)
        getattr(client, method)(schedule.recurring_run_id)
        schedule = client.get_recurring_run(schedule.recurring_run_id)
        _print(client, schedule, str(chosen("time_zone")["time_zone"]), as_json)


def _settings(options: dict[str, Any]) -> dict[str, Any]:
    from kfp_ddp.client.scheduling import moment

    if options["latest"] and "@" in (options["pipeline"] or ""):
        raise InputError(
            f"--latest and the version of {options['pipeline']} exclude each other: "
            "leave one of them out"
        )
    zone = cron.zone(options["time_zone"])
    names = ("cron", "start", "end", "catchup", "max_concurrency", *RUN_SETTINGS)
    fields = {name: options[name] for name in names if options[name] not in (None, "")}
    for name in {"start", "end"} & fields.keys():
        fields[name] = None if fields[name] == NEVER else moment(fields[name], zone, name)
    if "cron" in fields:
        fields["cron"] = cron.six_fields(fields["cron"])
    return fields


def _print(
    client: "Client", schedule: "V2beta1RecurringRun", zone: str, as_json: bool, **more: Any
) -> None:
    content = {**schedules.document(client, schedule, zone, {}), **more}
    title = f"{content['name']} ({content['id'][:8]}) is {content['state']}"
    rows = (f"  {label:14}{text}" for label, text in schedules.rows(content))
    show(as_json, content, title, *rows)
    if content["warning"] and not as_json:
        echo(f"! {content['warning']}", err=True)
