"""Recurring runs in the Python API."""

import dataclasses
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Any

from kfp_ddp.client import cron, schedules, scheduling
from kfp_ddp.client.run_info import info_of
from kfp_ddp.client.submission import Inputs, arguments, check_images, check_secrets, uploaded
from kfp_ddp.core.errors import InputError
from kfp_ddp.core.images import PUBLIC

if TYPE_CHECKING:
    from kfp_server_api import V2beta1RecurringRun

    from kfp_ddp.client.api import Client, Run

Row = dict[str, Any]
RUN_SETTINGS = ("pipeline_root", "service_account")
TIMES = ("cron", "pipeline", "latest", "start", "end", "catchup", "max_concurrency")
EMPTY = Inputs()
INSTALLS = "installs packages in each step: build images, and set registry"


class Schedules:
    """The recurring runs of a server; each is a mapping, as `kfp-ddp schedule show --json`."""

    def __init__(self, client: "Client") -> None:
        self._client, self._names = client, dict[tuple[str, str], str]()
        self._zone = client.chosen("time_zone")["time_zone"]

    def all(self) -> list[Row]:
        """Return all, the newest first."""
        return [self._row(one) for one in schedules.list_all(self._client.finder.client)]

    def get(self, name: str, runs: int = 5) -> Row:
        """Return that of a name, an id, or the start of one, with its newest `runs`."""
        schedule, client = self._find(name), self._client
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
        run = scheduling.start_now(self._client.finder.client, self._find(name))
        return self._client.get_run(run.run_id)

    def delete(self, name: str, wait: bool = False, force: bool = False) -> Row:
        """Delete it; refused while a run is active, unless it waits for it, or ends it by force."""
        if wait and force:
            raise InputError("--wait and --force exclude each other: give one of them")
        scheduling.delete(self._client.finder.client, schedule := self._find(name), wait, force)
        return {"deleted": schedule.recurring_run_id, "name": schedule.display_name}

    def create(
        self, name: str, *, paused: bool = False, inputs: Inputs = EMPTY, **settings: Any
    ) -> Row:
        """Create the schedule of an uploaded pipeline; its input is checked.

        `settings` are cron and pipeline, others of `TIMES`, and parameters of the pipeline. By
        default it always runs the current version, one run at a time, and one for all times that it
        missed. `notes` of the result are for its author.
        """
        client, chosen = self._client, self._client.chosen("experiment", "destination", "registry")
        own = client.chosen(*RUN_SETTINGS)
        fields, pipeline, latest, inputs = self._split({**own, **settings}, inputs)
        for required, value in (("cron", fields.get("cron")), ("pipeline", pipeline)):
            if not value:
                raise InputError(f"--{required} is missing: a schedule needs a time and a pipeline")
        check_secrets({"name": name, "experiment": chosen["experiment"], **fields})
        document, version = uploaded(client.finder.client, pipeline)
        check_images(document, chosen["registry"])
        plan = schedules.SchedulePlan(
            name=name,
            pipeline_id=version.pipeline_id,
            version_id="" if latest else version.version_id,
            arguments=arguments(document, inputs, {"destination": chosen["destination"]}),
            enabled=not paused,
            **fields,
        )
        scheduling.check(plan, cron.zone(self._zone), datetime.now(UTC))
        new = scheduling.create(client.finder.client, plan, chosen["experiment"])
        installs = {*PUBLIC.values()} & {*document.images()} and INSTALLS
        return {**self._row(new), "notes": [*filter(None, (cron.often(plan.cron), installs))]}

    def replace(
        self, name: str, *, unset: Sequence[str] = (), inputs: Inputs = EMPTY, **settings: Any
    ) -> Row:
        """Change it: a new one of the same name replaces it; other settings are copied.

        Settings are as in `create`, and `unset` are parameters to reset. `remaining` of the result
        are ids of old ones, which are paused until their runs are over.
        """
        fields, pipeline, latest, inputs = self._split(settings, inputs)
        client, old = self._client.finder.client, self._find(name)
        scheduling.check_state(client, old, name)
        before = schedules.plan_of(old, datetime.now(UTC))
        if not (before.cron or fields.get("cron")):
            raise InputError(f"{before.name} has no valid cron to copy: give --cron")
        newest = not before.version_id and "@" not in pipeline if latest is None else latest
        unpinned = before if latest is None else dataclasses.replace(before, version_id="")
        pipeline = pipeline or schedules.version_of(client, unpinned)
        document, version = uploaded(client, pipeline)
        plan = dataclasses.replace(
            before,
            pipeline_id=version.pipeline_id,
            version_id="" if newest else version.version_id,
            arguments=scheduling.changed(document, before.arguments, inputs, unset),
            **fields,
        )
        scheduling.check(plan, cron.zone(self._zone), datetime.now(UTC))
        new, remaining = scheduling.replace_by(client, old, plan)
        return {**self._row(new), "remaining": [one.recurring_run_id for one in remaining]}

    def _split(self, settings: Row, inputs: Inputs) -> tuple[Row, str, bool | None, Inputs]:
        """Return the fields of a SchedulePlan, the pipeline, whether its newest, and the inputs."""
        names = {*TIMES, *RUN_SETTINGS}
        words = [item for item in settings.items() if item[0] not in names]
        fields = {n: settings[n] for n in names & settings.keys() if settings[n] not in (None, "")}
        pipeline, latest = fields.pop("pipeline", ""), fields.pop("latest", None)
        if latest and "@" in pipeline:
            raise InputError(
                f"--latest and the version of {pipeline} exclude each other: leave one of them out"
            )
        zone = cron.zone(self._zone)
        for name in {"start", "end"} & fields.keys():
            never = fields[name] == "never"
            fields[name] = None if never else scheduling.moment(str(fields[name]), zone, name)
        if "cron" in fields:
            fields["cron"] = cron.six_fields(fields["cron"])
        return fields, pipeline, latest, inputs._replace(words=[*inputs.words, *words])

    def _find(self, name: str) -> "V2beta1RecurringRun":
        return schedules.find(self._client.finder.client, name)

    def _row(self, schedule: "V2beta1RecurringRun") -> Row:
        client = self._client.finder.client
        return schedules.document(client, schedule, self._zone, self._names)

    def _switch(self, name: str, method: str) -> Row:
        client, schedule = self._client.finder.client, self._find(name)
        getattr(client, method)(schedule.recurring_run_id)
        return self._row(client.get_recurring_run(schedule.recurring_run_id))
