"""Recurring runs in the Python API, changed without ending their runs."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, tzinfo
from itertools import islice
from time import sleep
from typing import TYPE_CHECKING, Any

from kfp_ddp.client.kfp import cron, schedules
from kfp_ddp.client.kfp.pipelines import find_version
from kfp_ddp.client.kfp.schedules import ENABLED, RUN_SETTINGS, TIMES, SchedulePlan, state
from kfp_ddp.client.run.run_info import info_of
from kfp_ddp.client.submit import own_package, submission
from kfp_ddp.client.submit.submission import Inputs
from kfp_ddp.core.container_images import PUBLIC
from kfp_ddp.core.errors import InputError, KfpDdpError, ServerError
from kfp_ddp.core.secrets import check_secrets
from kfp_ddp.core.settings import hint
from kfp_ddp.pipelines.form import Form

if TYPE_CHECKING:
    from kfp_server_api import V2beta1RecurringRun, V2beta1Run

    from kfp_ddp.client.api import Client, Run
    from kfp_ddp.client.kfp.compat import Client as Server
    from kfp_ddp.pipelines.document import Document

Row = dict[str, Any]
EMPTY = Inputs()
INSTALLS = "installs packages in each step: build images, and set registry"
PAUSE = 5.0
"""Seconds between two polls of runs that have to end."""


class Schedules:
    """The recurring runs of a server; each is a mapping, as `kfp-ddp schedule show --json`."""

    def __init__(self, client: "Client") -> None:
        self._client = client
        self._names: dict[tuple[str, str], str] = {}
        """Names of pipelines and versions by their ids."""
        self._zone = client.chosen("time_zone")["time_zone"]

    def all(self) -> list[Row]:
        """Return all, the newest first."""
        listed = schedules.list_all(self._client.finder.client)
        return [self._row(schedule) for schedule in listed]

    def get(self, name: str, runs: int = 5) -> Row:
        """Return that of a name, an id, or the start of one, with its newest `runs`."""
        schedule = self._find(name)
        client = self._client
        last = islice(schedules.runs_of(client.finder.client, schedule), runs)
        rows = [info_of(run, client.connection).document() for run in last]
        return {**self._row(schedule), "runs": rows}

    def pause(self, name: str) -> Row:
        """Start no runs until `resume`; active runs continue."""
        return self._switch(name, "disable_recurring_run")

    def resume(self, name: str) -> Row:
        """Start runs again."""
        return self._switch(name, "enable_recurring_run")

    def run_now(self, name: str) -> "Run":
        """Start an additional run; the schedule does not change."""
        from kfp_server_api import V2beta1Run

        client = self._client.finder.client
        schedule = self._find(name)
        reference = schedule.pipeline_version_reference
        if reference and not reference.pipeline_version_id:
            pipeline = client.get_pipeline(reference.pipeline_id)
            newest = find_version(client, pipeline)
            if newest is None:
                raise InputError(f"pipeline {pipeline.display_name!r} has no version on the server")
            reference.pipeline_version_id = newest.version_id
        run = V2beta1Run(
            display_name=f"{schedule.display_name}-{datetime.now(UTC):%Y%m%d-%H%M%S}",
            experiment_id=schedule.experiment_id,
            pipeline_version_reference=reference,
            pipeline_spec=None if reference else schedule.pipeline_spec,
            runtime_config=schedule.runtime_config,
            service_account=schedule.service_account,
        )
        return self._client.get_run(client.run_service.run_service_create_run(run=run).run_id)

    def delete(self, name: str, wait: bool = False, force: bool = False) -> Row:
        """Delete it; refused while a run is active, as KFP would end that, unless by `force`.

        With `wait`, pause it, and delete it when its runs are over.
        """
        if wait and force:
            raise InputError("--wait and --force exclude each other: give one of them")
        client = self._client.finder.client
        schedule = self._find(name)
        identity = schedule.recurring_run_id
        enabled = state(schedule) == ENABLED
        if not (force or wait):
            _check_idle(schedule, schedules.active_runs(client, schedule))
        if enabled:
            client.disable_recurring_run(identity)
        while not force:
            runs = schedules.active_runs(client, schedule)
            if not runs:
                break
            if wait:
                sleep(PAUSE)
                continue
            if enabled:  # a run started since the first check
                client.enable_recurring_run(identity)
            _check_idle(schedule, runs)
        client.delete_recurring_run(identity)
        return {"deleted": identity, "name": schedule.display_name}

    def create(
        self, name: str, *, paused: bool = False, inputs: Inputs = EMPTY, **settings: Any
    ) -> Row:
        """Create the schedule of an uploaded pipeline; its input is checked.

        `settings` are cron and pipeline, others of `TIMES`, and parameters of the pipeline. By
        default it always runs the current version, one run at a time, and one for all times that it
        missed. `notes` of the result are for its author.
        """
        client = self._client
        chosen = client.chosen("experiment", "destination", "registry")
        configured = client.chosen(*RUN_SETTINGS)
        fields, pipeline, latest, inputs = self._split({**configured, **settings}, inputs)
        for required, value in (("cron", fields.get("cron")), ("pipeline", pipeline)):
            if not value:
                raise InputError(f"--{required} is missing: a schedule needs a time and a pipeline")
        check_secrets({"name": name, "experiment": chosen["experiment"], **fields})
        document, version = submission.uploaded(client.finder.client, pipeline)
        own_package.check_images(document, chosen["registry"])
        plan = SchedulePlan(
            name=name,
            pipeline_id=version.pipeline_id,
            version_id="" if latest else version.version_id,
            arguments=submission.arguments(
                document, inputs, {"destination": chosen["destination"]}
            ),
            enabled=not paused,
            **fields,
        )
        _check(plan, cron.zone(self._zone), datetime.now(UTC))
        new = create(client.finder.client, plan, chosen["experiment"])
        notes = []
        often = cron.often(plan.cron)
        if often:
            notes.append(often)
        if {*PUBLIC.values()} & {*document.images()}:
            notes.append(INSTALLS)
        return {**self._row(new), "notes": notes}

    def replace(
        self, name: str, *, unset: Sequence[str] = (), inputs: Inputs = EMPTY, **settings: Any
    ) -> Row:
        """Change it: a new one of the same name replaces it; other settings are copied.

        Settings are as in `create`, and `unset` are parameters to reset. `remaining` of the result
        are ids of old ones, which are paused until their runs are over.
        """
        fields, pipeline, latest, inputs = self._split(settings, inputs)
        check_secrets(fields)
        client = self._client.finder.client
        old = self._find(name)
        if state(old) != ENABLED and name == old.display_name:
            _check_unique(client, name)
        before = schedules.plan_of(old, datetime.now(UTC))
        if not (before.cron or fields.get("cron")):
            raise InputError(f"{before.name} has no valid cron to copy: give --cron")
        if latest is None:  # as before, unless a version is given
            newest = not before.version_id and "@" not in pipeline
            base = before
        else:
            newest = latest
            base = replace(before, version_id="")
        pipeline = pipeline or schedules.version_of(client, base)
        document, version = submission.uploaded(client, pipeline)
        plan = replace(
            before,
            pipeline_id=version.pipeline_id,
            version_id="" if newest else version.version_id,
            arguments=_changed(document, before.arguments, inputs, unset),
            **fields,
        )
        _check(plan, cron.zone(self._zone), datetime.now(UTC))
        new, remaining = replace_by(client, old, plan)
        identities = [schedule.recurring_run_id for schedule in remaining]
        return {**self._row(new), "remaining": identities}

    def _split(self, settings: Row, inputs: Inputs) -> tuple[Row, str, bool | None, Inputs]:
        """Return the fields of a SchedulePlan, the pipeline, whether its newest, and the inputs."""
        names = {*TIMES, *RUN_SETTINGS}
        words = [item for item in settings.items() if item[0] not in names]
        known = names & settings.keys()
        fields = {name: settings[name] for name in known if settings[name] not in (None, "")}
        pipeline = fields.pop("pipeline", "")
        latest = fields.pop("latest", None)
        if latest and "@" in pipeline:
            raise InputError(
                f"--latest and the version of {pipeline} exclude each other: leave one of them out"
            )
        zone = cron.zone(self._zone)
        for name in {"start", "end"} & fields.keys():
            text = str(fields[name])
            fields[name] = None if text == "never" else _moment(text, zone, name)
        if "cron" in fields:
            fields["cron"] = cron.six_fields(fields["cron"])
        return fields, pipeline, latest, inputs._replace(words=[*inputs.words, *words])

    def _find(self, name: str) -> "V2beta1RecurringRun":
        return schedules.find(self._client.finder.client, name)

    def _row(self, schedule: "V2beta1RecurringRun") -> Row:
        client = self._client.finder.client
        return schedules.document(client, schedule, self._zone, self._names)

    def _switch(self, name: str, method: str) -> Row:
        client = self._client.finder.client
        schedule = self._find(name)
        getattr(client, method)(schedule.recurring_run_id)
        return self._row(client.get_recurring_run(schedule.recurring_run_id))


def _check(plan: SchedulePlan, zone: tzinfo, now: datetime) -> None:
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


def _check_unique(client: "Server", name: str) -> None:
    """Raise InputError if several schedules have this name, of which the newest was found."""
    same = schedules.named(schedules.list_all(client), name)
    if len(same) > 1:
        identities = ", ".join(schedule.recurring_run_id[:8] for schedule in same)
        raise InputError(
            f"{name!r} names {len(same)} paused schedules ({identities}), as a replace that was "
            "interrupted leaves them: resume one by its id, or replace it by its id"
        )


def create(client: "Server", plan: SchedulePlan, experiment: str) -> "V2beta1RecurringRun":
    """Create a schedule, whose runs are listed under an experiment; InputError if it exists."""
    for known in schedules.named(schedules.list_all(client), plan.name):
        raise _exists(known)
    experiment_id = client.create_experiment(experiment).experiment_id
    new = _send(client, replace(plan, experiment_id=experiment_id))
    return client.get_recurring_run(new.recurring_run_id)


def _exists(schedule: "V2beta1RecurringRun") -> InputError:
    name = schedule.display_name
    identity = schedule.recurring_run_id[:8]
    return InputError(
        f"schedule {name!r} already exists ({identity}, {state(schedule)}): change it by "
        f"kfp-ddp schedule replace {name}, or give another name"
    )


def replace_by(
    client: "Server", old: "V2beta1RecurringRun", plan: SchedulePlan
) -> "tuple[V2beta1RecurringRun, list[V2beta1RecurringRun]]":
    """Replace a schedule by a new one; both are never enabled, and no run is ended.

    Return the new one, and those that remain, paused, because of an active run.
    """
    earlier = schedules.named(schedules.list_all(client), old.display_name)
    new = _send(client, replace(plan, enabled=False))
    try:
        if state(old) == ENABLED:
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
    for schedule in earlier:
        identity = schedule.recurring_run_id
        if identity != old.recurring_run_id and state(schedule) == ENABLED:
            continue  # it only has the same name
        if schedules.active_runs(client, schedule):
            remaining.append(schedule)
        else:
            client.delete_recurring_run(identity)
    return client.get_recurring_run(new.recurring_run_id), remaining


def _check_idle(schedule: "V2beta1RecurringRun", runs: "list[V2beta1Run]") -> None:
    if runs:
        raise InputError(
            f"run {runs[0].run_id[:8]} of {schedule.display_name} is active, and KFP would end it: "
            "--wait deletes the schedule after it, --force now; or pause the schedule"
        )


def _changed(
    pipeline: "Document", old: Row, inputs: Inputs, unset: Sequence[str]
) -> dict[str, Any]:
    """Return the arguments of a schedule, updated setting by setting and checked."""
    for name in unset:
        if name not in old:
            raise InputError(f"--unset {name}: the schedule does not set it{hint(name, [*old])}")
    form = Form(pipeline)
    unchanged = {name: value for name, value in old.items() if name not in unset}
    new = form.read(inputs.file, inputs.words, unchanged)
    check_secrets(new)
    arguments = form.check({**unchanged, **new}.items())
    form.check_complete(arguments)
    submission.check(pipeline, arguments)
    return arguments


def _moment(text: str, zone: tzinfo, what: str) -> datetime:
    """Return a time, by default in the server's zone; raise InputError if it is invalid."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise InputError(
            f"{what}={text!r} is not a time: write 2027-01-31 or 2027-01-31T03:00"
        ) from None
    return time if time.tzinfo else time.replace(tzinfo=zone)


def _send(client: "Server", plan: SchedulePlan) -> "V2beta1RecurringRun":
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
