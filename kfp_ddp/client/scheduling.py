"""To create, replace, start and delete schedules, without ending what runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, tzinfo
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING, Any

from kfp_ddp.client import cron, schedules, submission
from kfp_ddp.client.pipelines import find_version
from kfp_ddp.core.errors import InputError, KfpDdpError, ServerError
from kfp_ddp.core.settings import hint
from kfp_ddp.pipelines.form import Form

if TYPE_CHECKING:
    import kfp
    from kfp_server_api import V2beta1PipelineVersionReference, V2beta1RecurringRun, V2beta1Run

    from kfp_ddp.pipelines.document import Document

PAUSE = 5.0
"""Seconds between two looks at runs that are waited for."""


@dataclass(frozen=True)
class Plan:
    """A schedule to be."""

    name: str
    cron: str
    """Six fields."""
    pipeline_id: str
    version_id: str
    """'' for the newest at each time."""
    experiment_id: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    start: datetime | None = None
    end: datetime | None = None
    catchup: bool = False
    max_concurrency: int = 1
    enabled: bool = True
    pipeline_root: str = ""
    service_account: str = ""

    def check(self, zone: tzinfo, now: datetime) -> None:
        """Refuse a schedule that would start nothing.

        Args:
            zone: That of the server's schedules.
            now: The time.

        Raises:
            InputError: it lies in the past, or its cron never comes.
        """
        if not self.name.strip():
            raise InputError("the name of a schedule is empty: give one such as nightly")
        if self.end and self.end <= now:
            raise InputError(f"end={self.end.isoformat()} is in the past: nothing would be started")
        if self.start and self.start <= now and not self.catchup:
            raise InputError(
                f"start={self.start.isoformat()} is in the past: leave it out, or give --catchup "
                "to start a run for each time since then"
            )
        begin = max(self.start or now, now)
        first = cron.next_times(self.cron, zone, begin, 1)[0]
        if self.end and first > self.end:
            raise InputError(
                f"{self.cron!r} does not come before end={self.end.isoformat()}: the first time "
                f"is {first.isoformat()}"
            )

    def send(self, client: "kfp.Client") -> "V2beta1RecurringRun":
        """Create it.

        Raises:
            RefusedError: the server refuses it.
            ServerError: there is no answer.
        """
        import kfp_server_api as api

        times = {"start_time": self.start, "end_time": self.end}
        schedule = api.V2beta1RecurringRun(
            display_name=self.name,
            experiment_id=self.experiment_id,
            pipeline_version_reference=api.V2beta1PipelineVersionReference(
                pipeline_id=self.pipeline_id, pipeline_version_id=self.version_id or None
            ),
            runtime_config=api.V2beta1RuntimeConfig(
                parameters=self.arguments, pipeline_root=self.pipeline_root or None
            ),
            trigger=api.V2beta1Trigger(
                cron_schedule=api.V2beta1CronSchedule(cron=self.cron, **times)
            ),
            mode="ENABLE" if self.enabled else "DISABLE",
            no_catchup=not self.catchup,
            max_concurrency=str(self.max_concurrency),
            service_account=self.service_account or None,
        )
        service = client._recurring_run_api
        return service.recurring_run_service_create_recurring_run(recurring_run=schedule)


def create(client: "kfp.Client", plan: Plan, experiment: str) -> "V2beta1RecurringRun":
    """Create a schedule of a new name, whose runs are listed under an experiment.

    Raises:
        InputError: there is one of this name.
    """
    known = schedules.named(schedules.all_of(client), plan.name)
    if known:
        raise InputError(
            f"there is a schedule {plan.name!r} ({known[0].recurring_run_id[:8]}): "
            f"kfp-ddp schedule replace {plan.name} changes it, or give another name"
        )
    found = client.create_experiment(experiment)
    return replace(plan, experiment_id=found.experiment_id).send(client)


def plan_of(schedule: "V2beta1RecurringRun", now: datetime) -> Plan:
    """A plan to have a schedule again; its cron is '' where the server reads another one.

    A start that is over is left out, since what came since is not to be done again.
    """
    reference, runtime = schedule.pipeline_version_reference, schedule.runtime_config
    start, end = schedules.limits(schedule)
    given = schedules.written(schedule)
    return Plan(
        name=schedule.display_name,
        cron="" if len(given.split()) == 5 else cron.as_read(given),
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


def succeed(
    client: "kfp.Client", old: "V2beta1RecurringRun", plan: Plan
) -> "tuple[V2beta1RecurringRun, list[V2beta1RecurringRun]]":
    """Put a schedule in another's place; never are both enabled, and no run is ended.

    Returns:
        The new one, and those of its name that stay, paused, as a run of theirs goes on.

    Raises:
        KfpDdpError: the server refuses the new one, and the old one is as it was.
    """
    new = replace(plan, enabled=False).send(client)
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
                f"the new schedule is there, but both are paused: {error}; then "
                f"kfp-ddp schedule resume {new.recurring_run_id}"
            ) from None
    others = [
        one
        for one in schedules.named(schedules.all_of(client), old.display_name)
        if one.recurring_run_id != new.recurring_run_id
        and schedules.state(one) != schedules.ENABLED
    ]
    stay = [one for one in others if schedules.going(client, one)]
    for one in others:
        if one not in stay:
            client.delete_recurring_run(one.recurring_run_id)
    return client.get_recurring_run(new.recurring_run_id), stay


def delete(
    client: "kfp.Client", schedule: "V2beta1RecurringRun", wait: bool = False, force: bool = False
) -> None:
    """Delete a schedule; KFP ends with it what it has started.

    Args:
        client: Of the server.
        schedule: To delete.
        wait: Whether to wait, with the schedule paused, until its runs are over.
        force: Whether to end them.

    Raises:
        InputError: a run of it goes on; the schedule is as it was.
    """
    identity, was = schedule.recurring_run_id, schedules.state(schedule)
    if not (force or wait):
        _refuse(schedule, schedules.going(client, schedule))
    if was == schedules.ENABLED:
        client.disable_recurring_run(identity)
    while not force and (runs := schedules.going(client, schedule)):
        if wait:
            sleep(PAUSE)
            continue
        if was == schedules.ENABLED:  # the run began since the first look
            client.enable_recurring_run(identity)
        _refuse(schedule, runs)
    client.delete_recurring_run(identity)


def _refuse(schedule: "V2beta1RecurringRun", runs: "list[V2beta1Run]") -> None:
    if runs:
        raise InputError(
            f"the run {runs[0].run_id[:8]} of {schedule.display_name} goes on, and KFP would end "
            "it: --wait deletes the schedule after it, --force now; or pause it"
        )


def start_now(
    client: "kfp.Client", schedule: "V2beta1RecurringRun", now: datetime | None = None
) -> "V2beta1Run":
    """Start a run as the schedule would, beside those that it starts itself.

    Raises:
        InputError: its pipeline is gone.
    """
    from kfp_server_api import V2beta1Run

    reference = schedule.pipeline_version_reference
    run = V2beta1Run(
        display_name=f"{schedule.display_name}-{now or datetime.now(UTC):%Y%m%d-%H%M%S}",
        experiment_id=schedule.experiment_id,
        pipeline_version_reference=reference and _pinned(client, reference),
        pipeline_spec=None if reference else schedule.pipeline_spec,
        runtime_config=schedule.runtime_config,
        service_account=schedule.service_account,
    )
    return client._run_api.run_service_create_run(run=run)


def _pinned(
    client: "kfp.Client", reference: "V2beta1PipelineVersionReference"
) -> "V2beta1PipelineVersionReference":
    from kfp_server_api import V2beta1PipelineVersionReference

    if reference.pipeline_version_id:
        return reference
    newest = find_version(client, client.get_pipeline(reference.pipeline_id))
    return V2beta1PipelineVersionReference(
        pipeline_id=reference.pipeline_id, pipeline_version_id=newest.pipeline_version_id
    )


def version_of(client: "kfp.Client", plan: Plan) -> str:
    """The pipeline that is run, as NAME@VERSION, or NAME where it is always the newest.

    Raises:
        InputError: it is gone, or has no name of its own.
    """
    if not plan.pipeline_id:
        raise InputError(f"{plan.name} holds a pipeline of no name: give --pipeline")
    pipeline = client.get_pipeline(plan.pipeline_id).display_name
    if not plan.version_id:
        return str(pipeline)
    version = client.get_pipeline_version(plan.pipeline_id, plan.version_id)
    return f"{pipeline}@{version.display_name}"


def changed(
    pipeline: "Document",
    old: Mapping[str, Any],
    file: Path | None,
    words: Sequence[str],
    unset: Sequence[str],
) -> dict[str, Any]:
    """The arguments of a schedule with others over them, setting by setting, checked as a whole.

    Args:
        pipeline: Whose form they fill.
        old: Of the schedule that is replaced.
        file: A YAML file of settings; None for none.
        words: Settings as key=value, over those of the file.
        unset: Parameters that get their default again.

    Raises:
        InputError: what cannot be used.
    """
    for name in unset:
        if name not in old:
            raise InputError(f"--unset {name}: the schedule does not set it{hint(name, [*old])}")
    form = Form(pipeline)
    given = form.read(file, words)
    kept = {name: value for name, value in old.items() if name not in unset}
    for name in form.subjects:
        if name in given and name in kept:
            given[name] = {**kept[name], **given[name]}
    arguments = form.completed(form.check({**kept, **given}.items()))
    submission.check(pipeline, arguments)
    return arguments


def moment(text: str, zone: tzinfo, what: str) -> datetime:
    """A time as people write it, in the server's zone where it names none.

    Raises:
        InputError: it is none.
    """
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise InputError(
            f"{what}={text!r} is no time: write 2027-01-31 or 2027-01-31T03:00"
        ) from None
    return found if found.tzinfo else found.replace(tzinfo=zone)
