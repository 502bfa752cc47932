"""Create, replace, start and delete schedules without ending their runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, tzinfo
from http import HTTPStatus
from time import sleep
from typing import TYPE_CHECKING, Any

from kfp_ddp.client import cron, schedules, submission
from kfp_ddp.client.pipelines import find_version
from kfp_ddp.client.schedules import SchedulePlan
from kfp_ddp.core.errors import InputError, KfpDdpError, RefusedError, ServerError
from kfp_ddp.core.settings import hint
from kfp_ddp.pipelines.form import Form

if TYPE_CHECKING:
    from kfp_server_api import V2beta1RecurringRun, V2beta1Run

    from kfp_ddp.client.compat import Client
    from kfp_ddp.pipelines.document import Document

PAUSE = 5.0
"""Seconds between two polls of runs that have to end."""


def check(plan: SchedulePlan, zone: tzinfo, now: datetime) -> None:
    """Raise InputError for a schedule that would start no run."""
    if not plan.name.strip():
        raise InputError("the name of a schedule is empty: give one such as nightly")
    if plan.end and plan.end <= now:
        raise InputError(f"end={plan.end.isoformat()} is in the past: no run would start")
    if plan.start and plan.start <= now and not plan.catchup:
        raise InputError(
            f"start={plan.start.isoformat()} is in the past: leave it out, or give --catchup "
            "to start a run for each time since then"
        )
    begin = max(plan.start or now, now)
    first = cron.next_times(plan.cron, zone, begin, 1)[0]
    if plan.end and first > plan.end:
        raise InputError(
            f"{plan.cron!r} has no time before end={plan.end.isoformat()}: the first is "
            f"{first.isoformat()}"
        )


def create(client: "Client", plan: SchedulePlan, experiment: str) -> "V2beta1RecurringRun":
    """Create a schedule, whose runs are listed under an experiment; InputError if it exists."""
    for known in schedules.named(schedules.list_all(client), plan.name):
        raise _exists(known)
    experiment_id = client.create_experiment(experiment).experiment_id
    new = _send(client, replace(plan, experiment_id=experiment_id, enabled=False))
    _check_first(client, new, or_enabled=True)
    if plan.enabled:
        client.enable_recurring_run(new.recurring_run_id)
        _check_first(client, new, or_enabled=False)
    return client.get_recurring_run(new.recurring_run_id)


def _check_first(client: "Client", new: "V2beta1RecurringRun", or_enabled: bool) -> None:
    """Delete a new schedule again if another client created the same one before it.

    Of two, at least one sees the other: each looks after it was created, paused, and again after
    it was enabled.
    """
    for other in schedules.named(schedules.list_all(client), new.display_name):
        enabled = or_enabled and schedules.state(other) == schedules.ENABLED
        first = min(other, new, key=_age)
        if other.recurring_run_id != new.recurring_run_id and (enabled or first is other):
            client.delete_recurring_run(new.recurring_run_id)
            raise _exists(other)


def _age(schedule: "V2beta1RecurringRun") -> tuple[datetime, str]:
    return schedule.created_at, schedule.recurring_run_id


def _exists(schedule: "V2beta1RecurringRun") -> InputError:
    name, identity = schedule.display_name, schedule.recurring_run_id[:8]
    return InputError(
        f"schedule {name!r} already exists ({identity}, {schedules.state(schedule)}): change it by "
        f"kfp-ddp schedule replace {name}, or give another name"
    )


def check_state(client: "Client", old: "V2beta1RecurringRun", word: str) -> None:
    """Raise InputError for several paused schedules of a name: a killed `replace` leaves them."""
    if schedules.state(old) != schedules.ENABLED and word == old.display_name:
        same = [
            one.recurring_run_id[:8] for one in schedules.named(schedules.list_all(client), word)
        ]
        if len(same) > 1:
            raise InputError(
                f"{word!r} names {len(same)} paused schedules ({', '.join(same)}), as a replace "
                "that was interrupted leaves them: resume one by its id, or replace it by its id"
            )


def replace_by(
    client: "Client", old: "V2beta1RecurringRun", plan: SchedulePlan
) -> "tuple[V2beta1RecurringRun, list[V2beta1RecurringRun]]":
    """Replace a schedule by a new one; both are never enabled, and no run is ended.

    Of two calls at once the schedule that is created last remains: each looks after it has enabled
    its own. Return the new one, and those that remain, paused, because of an active run.
    """
    new = _send(client, replace(plan, enabled=False))
    try:
        if schedules.state(old) == schedules.ENABLED:
            client.disable_recurring_run(old.recurring_run_id)
    except KfpDdpError:
        client.delete_recurring_run(new.recurring_run_id)
        raise
    if plan.enabled:
        try:
            client.enable_recurring_run(new.recurring_run_id)
        except KfpDdpError as error:
            raise ServerError(
                f"the new schedule exists, but both are paused: {error}; then run "
                f"kfp-ddp schedule resume {new.recurring_run_id}"
            ) from None
    remaining = []
    for one in schedules.named(schedules.list_all(client), old.display_name):
        identity, is_enabled = one.recurring_run_id, schedules.state(one) == schedules.ENABLED
        earlier = identity == old.recurring_run_id or _age(one) < _age(new)
        if identity == new.recurring_run_id or (is_enabled and not plan.enabled):
            continue
        if is_enabled and not earlier:
            _if_there(client.delete_recurring_run, new)
            raise _exists(one)
        if is_enabled:
            _if_there(client.disable_recurring_run, one)
        if schedules.active_runs(client, one):
            remaining.append(one)
        elif earlier:
            _if_there(client.delete_recurring_run, one)
    return client.get_recurring_run(new.recurring_run_id), remaining


def _if_there(change: Callable[[str], Any], schedule: "V2beta1RecurringRun") -> None:
    """Change a schedule, unless another client has deleted it."""
    try:
        change(schedule.recurring_run_id)
    except RefusedError as error:
        if error.status != HTTPStatus.NOT_FOUND:
            raise


def delete(
    client: "Client", schedule: "V2beta1RecurringRun", wait: bool = False, force: bool = False
) -> None:
    """Delete a schedule, with which KFP ends its runs; raise InputError if a run of it is active.

    With `wait`, pause the schedule, and wait until its runs are over.
    """
    identity, before = schedule.recurring_run_id, schedules.state(schedule)
    if not (force or wait):
        _check_idle(schedule, schedules.active_runs(client, schedule))
    if before == schedules.ENABLED:
        client.disable_recurring_run(identity)
    while not force and (runs := schedules.active_runs(client, schedule)):
        if wait:
            sleep(PAUSE)
            continue
        if before == schedules.ENABLED:  # a run started since the first check
            client.enable_recurring_run(identity)
        _check_idle(schedule, runs)
    client.delete_recurring_run(identity)


def _check_idle(schedule: "V2beta1RecurringRun", runs: "list[V2beta1Run]") -> None:
    if runs:
        raise InputError(
            f"run {runs[0].run_id[:8]} of {schedule.display_name} is active, and KFP would end it: "
            "--wait deletes the schedule after it, --force now; or pause the schedule"
        )


def start_now(client: "Client", schedule: "V2beta1RecurringRun") -> "V2beta1Run":
    """Start an additional run of a schedule; raise InputError if its pipeline was deleted."""
    from kfp_server_api import V2beta1PipelineVersionReference, V2beta1Run

    reference = schedule.pipeline_version_reference
    if reference and not reference.pipeline_version_id:
        pipeline = client.get_pipeline(reference.pipeline_id)
        newest = find_version(client, pipeline)
        if newest is None:
            raise InputError(f"pipeline {pipeline.display_name!r} has no version on the server")
        reference = V2beta1PipelineVersionReference(
            pipeline_id=newest.pipeline_id, pipeline_version_id=newest.version_id
        )
    run = V2beta1Run(
        display_name=f"{schedule.display_name}-{datetime.now(UTC):%Y%m%d-%H%M%S}",
        experiment_id=schedule.experiment_id,
        pipeline_version_reference=reference,
        pipeline_spec=None if reference else schedule.pipeline_spec,
        runtime_config=schedule.runtime_config,
        service_account=schedule.service_account,
    )
    return client.run_service.run_service_create_run(run=run)


def changed(
    pipeline: "Document",
    old: Mapping[str, Any],
    inputs: submission.Inputs,
    unset: Sequence[str],
) -> dict[str, Any]:
    """Return the arguments of a schedule, updated setting by setting and checked."""
    for name in unset:
        if name not in old:
            raise InputError(f"--unset {name}: the schedule does not set it{hint(name, [*old])}")
    form = Form(pipeline)
    unchanged = {name: value for name, value in old.items() if name not in unset}
    new = form.read(inputs.file, inputs.words, unchanged)
    submission.check_secrets(new)
    arguments = form.check({**unchanged, **new}.items())
    form.check_complete(arguments)
    submission.check(pipeline, arguments)
    return arguments


def moment(text: str, zone: tzinfo, what: str) -> datetime:
    """Return a time, by default in the server's zone; raise InputError if it is invalid."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise InputError(
            f"{what}={text!r} is not a time: write 2027-01-31 or 2027-01-31T03:00"
        ) from None
    return time if time.tzinfo else time.replace(tzinfo=zone)


def _send(client: "Client", plan: SchedulePlan) -> "V2beta1RecurringRun":
    import kfp_server_api as api

    times = {"start_time": plan.start, "end_time": plan.end}
    schedule = api.V2beta1RecurringRun(
        display_name=plan.name,
        experiment_id=plan.experiment_id,
        pipeline_version_reference=api.V2beta1PipelineVersionReference(
            pipeline_id=plan.pipeline_id, pipeline_version_id=plan.version_id or None
        ),
        runtime_config=api.V2beta1RuntimeConfig(
            parameters=plan.arguments, pipeline_root=plan.pipeline_root or None
        ),
        trigger=api.V2beta1Trigger(cron_schedule=api.V2beta1CronSchedule(cron=plan.cron, **times)),
        mode="ENABLE" if plan.enabled else "DISABLE",
        no_catchup=not plan.catchup,
        max_concurrency=str(plan.max_concurrency),
        service_account=plan.service_account or None,
    )
    return client.schedule_service.recurring_run_service_create_recurring_run(
        recurring_run=schedule
    )
