"""`kfp-ddp schedule`: recurring runs."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kfp_ddp.cli.options import AS_JSON, configured, connected, echo_json, typed
from kfp_ddp.core.config import Connection

if TYPE_CHECKING:
    import kfp
    from kfp_server_api import V2beta1RecurringRun

OF_RUNS = ("pipeline_root", "service_account")
WAIT = click.option("--wait", is_flag=True, help="Pause it, and delete it when its runs are over.")
FORCE = click.option("--force", is_flag=True, help="End its runs with it.")


def _timing(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options of what a schedule runs, and when."""
    for option in reversed(
        (
            click.option("--cron", help="Minute, hour, day, month, weekday, such as '0 3 * * *'."),
            click.option("--pipeline", help="Uploaded pipeline, as NAME or NAME@VERSION."),
            click.option(
                "--latest/--pinned",
                default=None,
                help="Run the pipeline's newest version at each time, or the one of now.  "
                "[default: pinned]",
            ),
            click.option(
                *("--set", "words"),
                multiple=True,
                metavar="KEY=VALUE",
                help="A parameter of the pipeline or a setting in it. May be repeated.",
            ),
            click.option(
                *("--file", "-f"),
                type=click.Path(path_type=Path, dir_okay=False),
                help="YAML file of such settings, under those of --set.",
            ),
            click.option("--start", help="Not before this time, such as 2027-01-31T03:00."),
            click.option("--end", help="Not after this time."),
            click.option(
                "--catchup/--no-catchup",
                default=None,
                help="After a pause, start a run for each time missed, or one for all.  "
                "[default: no-catchup]",
            ),
            click.option(
                "--max-concurrency",
                type=click.IntRange(1, 10),
                help="Runs of it at a time; one that is due waits.  [default: 1]",
            ),
            AS_JSON,
            configured("time_zone", *OF_RUNS),
        )
    ):
        command = option(command)
    return command


@click.group("schedule")
def command() -> None:
    """Start a pipeline again and again, at times that a cron of five fields tells.

    \b
    kfp-ddp schedule create nightly --pipeline retrain --cron '0 3 * * *' \\
        --set source=gs://bucket/flowers --set destination=gs://bucket/models
    """


@command.command("create")
@click.argument("name")
@click.option("--paused", is_flag=True, help="Do not start runs until `resume`.")
@configured("experiment", "destination")
@_timing
@connected
def create(connection: Connection, name: str, paused: bool, as_json: bool, **options: Any) -> None:
    """Create the schedule NAME of an uploaded pipeline (kfp-ddp upload), its form checked first.

    A schedule runs the version of now at each time: --latest lets it follow uploads.
    """
    from kfp_ddp.client import scheduling, submission
    from kfp_ddp.client.connection import open_client
    from kfp_ddp.client.cron import six_fields, zone
    from kfp_ddp.core.errors import InputError

    for given in ("cron", "pipeline"):
        if not options[given]:
            raise InputError(f"--{given} is missing: a schedule needs a time and a pipeline")
    six, own = six_fields(options["cron"]), zone(options["time_zone"])
    _check_latest(options)
    with open_client(connection) as client:
        pipeline, version = submission.of_server(client, options["pipeline"])
        boxes = {"destination": options["destination"]} if options["destination"] else {}
        boxes = {box: value for box, value in boxes.items() if box in pipeline.parameters}
        words = [f"{box}={value}" for box, value in boxes.items() if typed(box)]
        words += options["words"]
        plan = scheduling.Plan(
            name=name,
            cron=six,
            pipeline_id=version.pipeline_id,
            version_id="" if options["latest"] else version.version_id,
            arguments=submission.arguments(pipeline, options["file"], words, boxes),
            start=_moment(options, "start", own),
            end=_moment(options, "end", own),
            catchup=bool(options["catchup"]),
            max_concurrency=options["max_concurrency"] or 1,
            enabled=not paused,
            **{each: options[each] for each in OF_RUNS},
        )
        _check(plan, own)
        made = scheduling.create(client, plan, options["experiment"])
        _tell(client, made, options["time_zone"], as_json)


@command.command("replace")
@click.argument("schedule")
@click.option(
    "--unset", multiple=True, metavar="KEY", help="A parameter to leave at its default again."
)
@_timing
@connected
def replace(
    connection: Connection,
    schedule: str,
    unset: tuple[str, ...],
    as_json: bool,
    **options: Any,
) -> None:
    """Change SCHEDULE: a new one of its name takes its place, and what is not given stays.

    KFP cannot change one, and ends the running run of one that is deleted. So the new one is
    created first, then the old one is paused; it is deleted if no run of it goes on, else by the
    next `replace`, or by `delete`. Never are both enabled.
    """
    import dataclasses
    from datetime import UTC, datetime

    from kfp_ddp.client import schedules, scheduling, submission
    from kfp_ddp.client.connection import open_client
    from kfp_ddp.client.cron import six_fields, zone
    from kfp_ddp.core.errors import InputError

    own = zone(options["time_zone"])
    given = {
        "cron": six_fields(options["cron"]) if options["cron"] else "",
        "start": _moment(options, "start", own),
        "end": _moment(options, "end", own),
        "catchup": options["catchup"],
        "max_concurrency": options["max_concurrency"],
        **{each: options[each] for each in OF_RUNS},
    }
    _check_latest(options)
    with open_client(connection) as client:
        old = schedules.find(client, schedule)
        was = scheduling.plan_of(old, datetime.now(UTC))
        if not (was.cron or given["cron"]):
            raise InputError(f"{was.name} has no cron of six fields to keep: give --cron")
        asked, latest = options["pipeline"] or "", options["latest"]
        if latest is None:
            latest = not was.version_id and "@" not in asked
        if not asked:
            kept = dataclasses.replace(was, version_id="") if options["latest"] is not None else was
            asked = scheduling.version_of(client, kept)
        pipeline, version = submission.of_server(client, asked)
        arguments = scheduling.changed(
            pipeline, was.arguments, options["file"], options["words"], unset
        )
        plan = dataclasses.replace(
            was,
            pipeline_id=version.pipeline_id,
            version_id="" if latest else version.version_id,
            arguments=arguments,
            **{name: value for name, value in given.items() if value not in (None, "")},
        )
        _check(plan, own)
        new, stay = scheduling.succeed(client, old, plan)
        for one in stay:
            click.echo(
                f"the old one ({one.recurring_run_id[:8]}) is paused and stays until its run is "
                f"over: kfp-ddp schedule delete {one.recurring_run_id[:8]} --wait",
                err=True,
            )
        _tell(client, new, options["time_zone"], as_json)


@command.command("list")
@AS_JSON
@configured("time_zone")
@connected
def list_(connection: Connection, time_zone: str, as_json: bool) -> None:
    """List the schedules, the newest first."""
    from kfp_ddp.client import schedules
    from kfp_ddp.client.connection import open_client
    from kfp_ddp.client.schedule_told import document, minute

    with open_client(connection) as client:
        pipelines: dict[tuple[str, str], str] = {}
        told = [document(client, one, time_zone, pipelines) for one in schedules.all_of(client)]
    if as_json:
        echo_json(told)
        return
    if not told:
        click.echo("no schedules", err=True)
        return
    lines = [("id", "name", "state", "when", f"next ({time_zone})", "pipeline")]
    for one in told:
        soon = minute(one["next"][0]) if one["next"] and one["state"] == schedules.ENABLED else ""
        lines.append((one["id"][:8], one["name"], one["state"], one["when"], soon, one["pipeline"]))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        padded = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        click.echo("  ".join(padded).rstrip())
    for one in told:
        if one["warning"]:
            click.echo(f"! {one['name']}: {one['warning']}", err=True)


@command.command("show")
@click.argument("schedule")
@AS_JSON
@configured("time_zone")
@connected
def show(connection: Connection, schedule: str, time_zone: str, as_json: bool) -> None:
    """Show SCHEDULE, a name or id: when it runs in words, its next times, its last runs."""
    from itertools import islice

    from kfp_ddp.client import runs, schedules
    from kfp_ddp.client.connection import open_client

    with open_client(connection) as client:
        found = schedules.find(client, schedule)
        last = [
            runs.document(run, connection) for run in islice(schedules.runs_of(client, found), 5)
        ]
        _tell(client, found, time_zone, as_json, runs=last)


@command.command("pause")
@click.argument("schedule")
@AS_JSON
@connected
def pause(connection: Connection, schedule: str, as_json: bool) -> None:
    """Let SCHEDULE start no more runs until `resume`; what runs goes on."""
    _switch(connection, schedule, "disable_recurring_run", as_json)


@command.command("resume")
@click.argument("schedule")
@AS_JSON
@connected
def resume(connection: Connection, schedule: str, as_json: bool) -> None:
    """Let SCHEDULE start runs again."""
    _switch(connection, schedule, "enable_recurring_run", as_json)


@command.command("run-now")
@click.argument("schedule")
@AS_JSON
@connected
def run_now(connection: Connection, schedule: str, as_json: bool) -> None:
    """Start a run of SCHEDULE at once, whatever its time; its state stays."""
    from kfp_ddp.client import runs, schedules, scheduling
    from kfp_ddp.client.connection import open_client

    with open_client(connection) as client:
        run = scheduling.start_now(client, schedules.find(client, schedule))
    if as_json:
        echo_json(runs.document(run, connection))
        return
    click.echo(f"{run.display_name} begins: {connection.run_page(run.run_id) or run.run_id}")
    click.echo(f"see how it goes: kfp-ddp status {run.run_id[:8]} --follow")


@command.command("delete")
@click.argument("schedule")
@WAIT
@FORCE
@AS_JSON
@connected
def delete(connection: Connection, schedule: str, wait: bool, force: bool, as_json: bool) -> None:
    """Delete SCHEDULE; refused while a run of it goes on, since KFP would end that too."""
    from kfp_ddp.client import schedules, scheduling
    from kfp_ddp.client.connection import open_client
    from kfp_ddp.core.errors import InputError

    if wait and force:
        raise InputError("--wait and --force do not go together: give one of them")
    with open_client(connection) as client:
        found = schedules.find(client, schedule)
        scheduling.delete(client, found, wait, force)
    name, identity = found.display_name, found.recurring_run_id
    if as_json:
        echo_json({"deleted": identity, "name": name})
    else:
        click.echo(f"{name} ({identity[:8]}) is deleted")


def _switch(connection: Connection, word: str, how: str, as_json: bool) -> None:
    from kfp_ddp.client import schedules
    from kfp_ddp.client.connection import open_client
    from kfp_ddp.core.config import config

    with open_client(connection) as client:
        found = schedules.find(client, word)
        getattr(client, how)(found.recurring_run_id)
        found = client.get_recurring_run(found.recurring_run_id)
        _tell(client, found, config().time_zone, as_json)


def _check_latest(options: dict[str, Any]) -> None:
    from kfp_ddp.core.errors import InputError

    if options["latest"] and "@" in (options["pipeline"] or ""):
        raise InputError(
            f"--latest and the version of {options['pipeline']} do not go together: "
            "leave one of them out"
        )


def _moment(options: dict[str, Any], name: str, own: Any) -> Any:
    from kfp_ddp.client.scheduling import moment

    return moment(options[name], own, name) if options[name] else None


def _check(plan: Any, own: Any) -> None:
    from datetime import UTC, datetime

    plan.check(own, datetime.now(UTC))


def _tell(
    client: "kfp.Client", found: "V2beta1RecurringRun", name: str, as_json: bool, **more: Any
) -> None:
    """Print a schedule: what it does and when, in words."""
    from kfp_ddp.client.schedule_told import document, rows

    told = {**document(client, found, name), **more}
    if as_json:
        echo_json(told)
        return
    click.echo(f"{told['name']} ({told['id'][:8]}) is {told['state']}")
    for label, text in rows(told):
        click.echo(f"  {label:14}{text}")
    if told["warning"]:
        click.echo(f"! {told['warning']}", err=True)
