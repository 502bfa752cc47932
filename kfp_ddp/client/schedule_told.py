"""What is told of a schedule: as a document, and in lines."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from kfp_ddp.client import schedules
from kfp_ddp.client.cron import zone
from kfp_ddp.client.scheduling import Plan, plan_of, version_of
from kfp_ddp.core.errors import InputError

if TYPE_CHECKING:
    import kfp
    from kfp_server_api import V2beta1RecurringRun


def document(
    client: "kfp.Client",
    schedule: "V2beta1RecurringRun",
    time_zone: str,
    pipelines: dict[tuple[str, str], str] | None = None,
) -> dict[str, Any]:
    """What `--json` prints of a schedule.

    Args:
        client: Of its server.
        schedule: As the server has it.
        time_zone: That of the server's schedules.
        pipelines: What pipelines and versions are called, to be asked for once each.
    """
    now, own = datetime.now(UTC), zone(time_zone)
    plan = plan_of(schedule, now)
    start, end = schedules.limits(schedule)
    known = {} if pipelines is None else pipelines
    key = (plan.pipeline_id, plan.version_id)
    if key not in known:
        known[key] = _pipeline(client, plan)
    return {
        "id": schedule.recurring_run_id,
        "name": schedule.display_name,
        "state": schedules.state(schedule, now),
        "cron": schedules.written(schedule),
        "when": schedules.when(schedule),
        "time_zone": time_zone,
        "next": [each.isoformat() for each in schedules.next_of(schedule, own, now)],
        "start": start and start.isoformat(),
        "end": end and end.isoformat(),
        "pipeline": known[key],
        "catchup": plan.catchup,
        "max_concurrency": plan.max_concurrency,
        "parameters": plan.arguments,
        "warning": schedules.misread(schedule),
    }


def rows(told: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """A document in lines, each with a label."""
    yield "when", f"{told['when']} ({told['cron']})" if told["cron"] else told["when"]
    yield "next", ", ".join(map(minute, told["next"])) or "never"
    yield "time zone", f"{told['time_zone']}, that of the server (CRON_SCHEDULE_TIMEZONE)"
    for label, name in (("from", "start"), ("until", "end")):
        if told[name]:
            yield label, minute(told[name])
    yield "pipeline", told["pipeline"]
    many = told["max_concurrency"]
    yield "at a time", f"{many} run{'s' * (many > 1)}; one that is due meanwhile waits"
    missed = "a run for each time" if told["catchup"] else "one run for all times"
    yield "after a pause", f"{missed} missed"
    for name, value in told["parameters"].items():
        yield "parameter", f"{name}={value if isinstance(value, str) else json.dumps(value)}"
    for run in told.get("runs", []):
        yield "run", f"{run['run_id'][:8]} {run['state'].lower()}, {minute(run['began'] or '')}"


def minute(moment: str) -> str:
    """A time as people read it."""
    return moment[:16].replace("T", " ")


def _pipeline(client: "kfp.Client", plan: Plan) -> str:
    if not plan.pipeline_id:
        return "a pipeline of its own"
    try:
        found = version_of(client, plan)
    except InputError:
        return "a pipeline that is gone"
    return found if plan.version_id else f"{found}, always the newest version"
