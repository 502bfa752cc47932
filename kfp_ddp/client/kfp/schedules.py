"""Schedules on a KFP server, which it calls recurring runs: find, read and describe them."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, tzinfo
from typing import TYPE_CHECKING, Any

from kfp_ddp.client.kfp import cron
from kfp_ddp.client.kfp.runs import NEVER, PAGE, UUID, get, known_time, matching, newest_runs, pages
from kfp_ddp.client.kfp.steps import OVER
from kfp_ddp.core.errors import InputError

if TYPE_CHECKING:
    from kfp_server_api import V2beta1RecurringRun, V2beta1Run

    from kfp_ddp.client.kfp.compat import Client

ALL = 1_000_000
RUN_SETTINGS = ("pipeline_root", "service_account")
TIMES = ("cron", "pipeline", "latest", "start", "end", "catchup", "max_concurrency")
ENABLED = "enabled"
PAUSED = "paused"
ENDED = "ended"


@dataclass(frozen=True)
class SchedulePlan:
    """The settings of a schedule."""

    name: str
    cron: str
    """Six fields."""
    pipeline_id: str
    version_id: str
    """'' for the newest version at each time."""
    experiment_id: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    start: datetime | None = None
    end: datetime | None = None
    catchup: bool = False
    max_concurrency: int = 1
    enabled: bool = True
    pipeline_root: str = ""
    service_account: str = ""


def list_all(client: "Client") -> "list[V2beta1RecurringRun]":
    """Return all schedules of the namespace, the newest first."""

    def read(token: str) -> "tuple[Sequence[V2beta1RecurringRun], str]":
        answer = client.list_recurring_runs(
            page_token=token,
            page_size=PAGE,
            sort_by="created_at desc",
            namespace=client.get_user_namespace() or None,  # here kfp has no default
        )
        return answer.recurring_runs, answer.next_page_token

    return [schedule for page in pages(read) for schedule in page]


def find(client: "Client", word: str) -> "V2beta1RecurringRun":
    """Return the schedule of a name, an id, or the start of one; InputError for none or several.

    Of several with this name it is the enabled one: the others were left by `replace`.
    """
    listing = "kfp-ddp schedule list shows them"
    if UUID.fullmatch(word):
        return get(client.get_recurring_run, word, f"schedule {word}", listing)
    known = list_all(client)
    matches = matching(known, word, "recurring_run_id", f"schedule {word!r}", listing)
    enabled = [schedule for schedule in matches if state(schedule) == ENABLED]
    names = {schedule.display_name for schedule in matches}
    if len(enabled) > 1 or len(names) > 1:
        several = ", ".join(schedule.recurring_run_id[:8] for schedule in matches)
        raise InputError(f"{word!r} matches {len(matches)} schedules: {several}; give one's id")
    return (enabled or matches)[0]


def named(schedules: "list[V2beta1RecurringRun]", name: str) -> "list[V2beta1RecurringRun]":
    """Return those of exactly this name."""
    return [schedule for schedule in schedules if schedule.display_name == name]


def runs_of(client: "Client", schedule: "V2beta1RecurringRun") -> "Iterator[V2beta1Run]":
    """Yield the runs that a schedule started, the newest first."""
    since = schedule.created_at or NEVER
    for run in newest_runs(client, ALL, schedule.experiment_id):
        if run.created_at and run.created_at < since:
            return  # this one and all older ones
        if run.recurring_run_id == schedule.recurring_run_id:
            yield run


def active_runs(client: "Client", schedule: "V2beta1RecurringRun") -> "list[V2beta1Run]":
    """Return its runs that are not over."""
    return [run for run in runs_of(client, schedule) if run.state not in OVER]


def state(schedule: "V2beta1RecurringRun", now: datetime | None = None) -> str:
    """Return enabled, paused or ended."""
    now = now or datetime.now(UTC)
    _, end = limits(schedule)
    if end is not None and end <= now:
        return ENDED
    return ENABLED if schedule.status == "ENABLED" else PAUSED


def cron_of(schedule: "V2beta1RecurringRun") -> str:
    """Return the cron as the server stores it; '' if there is none."""
    return str(_trigger(schedule).get("cron") or "")


def limits(schedule: "V2beta1RecurringRun") -> tuple[datetime | None, datetime | None]:
    """Return the start and the end of a schedule; None if unlimited."""
    trigger = _trigger(schedule)
    start = known_time(trigger.get("start_time"))
    end = known_time(trigger.get("end_time"))
    return start, end


def next_times(schedule: "V2beta1RecurringRun", zone: tzinfo, now: datetime) -> list[datetime]:
    """Return the next three times of an enabled schedule; empty if there are none, or not known."""
    six = cron.as_read(cron_of(schedule))
    if not six or state(schedule, now) != ENABLED:
        return []
    start, end = limits(schedule)
    begin = max(now, start or now)
    try:
        times = cron.next_times(six, zone, begin)
    except InputError:
        return []
    if end is None:
        return times
    return [time for time in times if time <= end]


def plan_of(schedule: "V2beta1RecurringRun", now: datetime) -> SchedulePlan:
    """Return the settings of a schedule, to create it again.

    The cron is '' if the server reads another one than its author wrote. A start in the past is
    dropped, so that missed runs are not repeated.
    """
    reference = schedule.pipeline_version_reference
    runtime = schedule.runtime_config
    start, end = limits(schedule)
    text = cron_of(schedule)
    misread = len(text.split()) == 5  # KFP reads the first field as seconds
    return SchedulePlan(
        name=schedule.display_name,
        cron="" if misread else cron.as_read(text),
        pipeline_id=(reference and reference.pipeline_id) or "",
        version_id=(reference and reference.pipeline_version_id) or "",
        experiment_id=schedule.experiment_id,
        arguments=dict((runtime and runtime.parameters) or {}),
        start=start if start and start > now else None,
        end=end,
        catchup=not schedule.no_catchup,
        max_concurrency=int(schedule.max_concurrency or 1),
        enabled=schedule.status == "ENABLED",
        pipeline_root=(runtime and runtime.pipeline_root) or "",
        service_account=schedule.service_account or "",
    )


def version_of(client: "Client", plan: SchedulePlan) -> str:
    """Return the pipeline as NAME@VERSION, or as NAME if it is always the newest version."""
    if not plan.pipeline_id:
        raise InputError(f"{plan.name} has a pipeline without a name: give --pipeline")
    pipeline = client.get_pipeline(plan.pipeline_id).display_name
    if not plan.version_id:
        return str(pipeline)
    version = client.get_pipeline_version(plan.pipeline_id, plan.version_id)
    return f"{pipeline}@{version.display_name}"


def document(
    client: "Client",
    schedule: "V2beta1RecurringRun",
    time_zone: str,
    cache: dict[tuple[str, str], str],
) -> dict[str, Any]:
    """Return what `--json` prints of a schedule; `cache` has names of pipelines by their ids."""
    now = datetime.now(UTC)
    zone = cron.zone(time_zone)
    plan = plan_of(schedule, now)
    start, end = limits(schedule)
    key = (plan.pipeline_id, plan.version_id)
    if key not in cache:
        cache[key] = _pipeline(client, plan)
    return {
        "id": schedule.recurring_run_id,
        "name": schedule.display_name,
        "state": state(schedule, now),
        "cron": cron_of(schedule),
        "when": _describe(schedule),
        "time_zone": time_zone,
        "next": [time.isoformat() for time in next_times(schedule, zone, now)],
        "start": start and start.isoformat(),
        "end": end and end.isoformat(),
        "pipeline": cache[key],
        "catchup": plan.catchup,
        "max_concurrency": plan.max_concurrency,
        "parameters": plan.arguments,
        "warning": _warning(schedule),
    }


def _pipeline(client: "Client", plan: SchedulePlan) -> str:
    """Return the pipeline of a schedule for people, also if it does not exist any more."""
    try:
        version = version_of(client, plan)
    except InputError:
        return "a deleted pipeline" if plan.pipeline_id else "a pipeline that was not uploaded"
    return version if plan.version_id else f"{version}, always the newest version"


def rows(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the lines of a document, each with a label."""
    when = document["when"]
    text = document["cron"]
    yield "when", f"{when} ({text})" if text else when
    never = "none while it is paused" if document["state"] == PAUSED else "never"
    yield "next", ", ".join(map(minute, document["next"])) or never
    yield "time zone", f"{document['time_zone']}, that of the server (CRON_SCHEDULE_TIMEZONE)"
    for label, name in (("from", "start"), ("until", "end")):
        if document[name]:
            yield label, minute(document[name])
    yield "pipeline", document["pipeline"]
    yield "concurrency", f"at most {document['max_concurrency']}; further runs wait"
    if document["catchup"]:
        yield "catch-up", "enabled (one run for each missed time)"
    else:
        yield "catch-up", "disabled (one run for all missed times)"
    for name, value in document["parameters"].items():
        shown = value if isinstance(value, str) else json.dumps(value)
        yield "parameter", f"{name}={shown}"
    for run in document.get("runs", []):
        yield "run", f"{run['run_id'][:8]} {run['state'].lower()}, {minute(run['began'] or '')}"


def minute(moment: str) -> str:
    """Return an ISO time as text, without seconds."""
    return moment[:16].replace("T", " ")


def _describe(schedule: "V2beta1RecurringRun") -> str:
    """Return when a schedule starts runs, for people."""
    seconds = _trigger(schedule).get("interval_second")
    if seconds:
        return f"Every {int(seconds):,} seconds"
    text = cron_of(schedule)
    six = cron.as_read(text)
    if six:
        return cron.describe(six)
    return text or "never"


def _warning(schedule: "V2beta1RecurringRun") -> str:
    """Return what is wrong with a cron that the server reads differently; '' if nothing."""
    text = cron_of(schedule)
    if len(text.split()) != 5:
        return ""
    return (
        f"its cron has five fields ({text}), of which KFP reads the first as seconds; "
        f"kfp-ddp schedule replace {schedule.display_name} --cron '{text}' corrects it"
    )


def _trigger(schedule: "V2beta1RecurringRun") -> dict[str, Any]:
    """Return the times of a schedule: a cron's, or those of a fixed period."""
    trigger = schedule.trigger
    if not trigger:
        return {}
    timing = trigger.cron_schedule or trigger.periodic_schedule
    return timing.to_dict() if timing else {}
