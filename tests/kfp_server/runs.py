"""Runs and recurring runs, in memory: nothing runs unless a test says that it did."""

import uuid

from tests.kfp_server import specs
from tests.kfp_server.catalog import NEVER, Catalog, Query, Row, filled, now
from tests.kfp_server.listing import page
from tests.kfp_server.refusal import gateway, invalid, unknown

OVER = ("SUCCEEDED", "FAILED", "SKIPPED", "CANCELED")


class Store(Catalog):
    """All that a server knows."""

    def __init__(self, multi_user: bool = False, version: str = "2.17.0") -> None:
        super().__init__(multi_user, version)
        self.runs: dict[str, Row] = {}
        self.recurring_runs: dict[str, Row] = {}

    def create_run(self, body: Row, query: Query) -> Row:
        doing = "create a new run"
        spec, reference = self._spec(body, doing)
        given = (body.get("runtime_config") or {}).get("parameters") or {}
        experiment = self._experiment(body, query, doing)
        specs.check_parameters(spec, given, doing)
        created = now()
        run = {
            "experiment_id": experiment["experiment_id"],
            "run_id": str(uuid.uuid4()),
            "display_name": body["display_name"],
            "storage_state": "AVAILABLE",
            **filled(body, "description"),
            **({"pipeline_version_reference": reference} if reference else {"pipeline_spec": spec}),
            "runtime_config": body.get("runtime_config") or {},
            "service_account": body.get("service_account") or "pipeline-runner",
            "created_at": created,
            "scheduled_at": created,
            "finished_at": NEVER,
            "state": "PENDING",
            "state_history": [{"update_time": created, "state": "PENDING"}],
            **filled(body, "recurring_run_id"),
        }
        self.runs[run["run_id"]] = run
        experiment["last_run_created_at"] = created
        return run

    def get_run(self, query: Query, run_id: str) -> Row:
        if run_id not in self.runs:
            raise unknown("Run", run_id)
        return self.runs[run_id]

    def list_runs(self, query: Query) -> Row:
        namespace = self._namespace(self._asked(query), "list runs")
        rows = self._of(self.runs, query.get("experiment_id", ""), namespace)
        return page("runs", rows, query, "list runs")

    def terminate_run(self, query: Query, run_id: str) -> Row:
        run = self.get_run(query, run_id)
        if run["state"] in OVER:
            raise invalid(
                f"terminate a run: Failed to terminate run {run_id}",
                f"Failed to terminate a run {run_id}. Row not found",
            )
        self.set_state(run_id, "CANCELING")
        return {}

    def retry_run(self, query: Query, run_id: str) -> Row:
        run = self.get_run(query, run_id)
        if run["state"] != "FAILED":
            refusal = gateway(
                409,
                f"Failed to retry a run: Failed to retry run {run_id}: BadRequestError",
                "Workflow must be Failed/Error to retry",
                code=10,
            )
            refusal.body["message"] += ": workflow cannot be retried"
            raise refusal
        run["finished_at"] = NEVER
        self.set_state(run_id, "RUNNING")
        return {}

    def spec_of(self, run_id: str) -> Row:
        """The pipeline of a run, without its platform's part."""
        run = self.runs[run_id]
        reference = run.get("pipeline_version_reference")
        known = self.versions[reference["pipeline_version_id"]] if reference else run
        spec: Row = known["pipeline_spec"]
        return dict(spec.get("pipeline_spec", spec))

    def set_state(self, run_id: str, state: str) -> None:
        """Let a run be in a state from now on, with its history."""
        run = self.runs[run_id]
        run["state"] = state
        run.setdefault("state_history", []).append({"update_time": now(), "state": state})
        if state in OVER:
            run["finished_at"] = now()

    def create_recurring_run(self, body: Row, query: Query) -> Row:
        doing = "create a recurring run"
        spec, reference = self._spec(body, doing)
        cron = ((body.get("trigger") or {}).get("cron_schedule") or {}).get("cron", "")
        fields = len(cron.split())
        if cron and not cron.startswith("@") and fields not in (5, 6):
            raise invalid(
                f"{doing} due to conversion error",
                "Schedule cron is not a supported format(https://godoc.org/github.com/robfig/cron)."
                f" Error: Expected 5 to 6 fields, found {fields}: {cron}",
            )
        experiment = self._experiment(body, query, doing)
        specs.check_parameters(
            spec, (body.get("runtime_config") or {}).get("parameters") or {}, doing
        )
        mode = body.get("mode", "ENABLE")
        created = now()
        recurring = {
            "recurring_run_id": str(uuid.uuid4()),
            "display_name": body["display_name"],
            **filled(body, "description"),
            **(
                filled(body, "pipeline_version_reference") if reference else {"pipeline_spec": spec}
            ),
            "runtime_config": body.get("runtime_config") or {},
            "service_account": body.get("service_account") or "pipeline-runner",
            "max_concurrency": str(body.get("max_concurrency", "1")),
            "trigger": body["trigger"],
            "mode": mode,
            "created_at": created,
            "updated_at": created,
            "status": f"{mode}D",
            **filled(body, "no_catchup"),
            "namespace": experiment.get("namespace", "kubeflow"),
            "experiment_id": experiment["experiment_id"],
        }
        self.recurring_runs[recurring["recurring_run_id"]] = recurring
        return recurring

    def get_recurring_run(self, query: Query, recurring_run_id: str) -> Row:
        if recurring_run_id not in self.recurring_runs:
            raise unknown("Job", recurring_run_id)
        return self.recurring_runs[recurring_run_id]

    def list_recurring_runs(self, query: Query) -> Row:
        namespace = self._namespace(self._asked(query), "list recurring runs")
        rows = self._of(self.recurring_runs, query.get("experiment_id", ""), namespace)
        return page("recurringRuns", rows, query, "list recurring runs")

    def enable_recurring_run(self, query: Query, recurring_run_id: str) -> Row:
        return self._switch(recurring_run_id, "ENABLE")

    def disable_recurring_run(self, query: Query, recurring_run_id: str) -> Row:
        return self._switch(recurring_run_id, "DISABLE")

    def delete_recurring_run(self, query: Query, recurring_run_id: str) -> Row:
        self.get_recurring_run(query, recurring_run_id)
        del self.recurring_runs[recurring_run_id]
        return {}

    def trigger(self, recurring_run_id: str) -> Row:
        """The run that a schedule starts when its time has come."""
        recurring = self.recurring_runs[recurring_run_id]
        names = ("experiment_id", "pipeline_spec", "pipeline_version_reference", "runtime_config")
        body = {name: recurring[name] for name in names if name in recurring}
        number = sum(run.get("recurring_run_id") == recurring_run_id for run in self.runs.values())
        body["display_name"] = f"{recurring['display_name']}-{number + 1}"
        return self.create_run(body | {"recurring_run_id": recurring_run_id}, {})

    def _switch(self, recurring_run_id: str, mode: str) -> Row:
        recurring = self.get_recurring_run({}, recurring_run_id)
        recurring |= {"mode": mode, "status": f"{mode}D", "updated_at": now()}
        return {}

    def _spec(self, body: Row, doing: str) -> tuple[Row, Row]:
        """The pipeline of a body, and the version that it is; {} where it was sent whole."""
        if not body.get("display_name"):
            raise invalid(doing, "The run name is empty. Please specify a valid name")
        if spec := body.get("pipeline_spec"):
            return spec, {}
        asked = body.get("pipeline_version_reference") or {}
        wanted = asked.get("pipeline_version_id")
        rows = [
            one
            for one in self._versions_of(asked.get("pipeline_id", ""))
            if wanted in (None, one["pipeline_version_id"])
        ]
        if not rows:
            raise unknown("PipelineVersion", wanted or asked.get("pipeline_id", ""))
        newest = rows[-1]
        names = ("pipeline_id", "pipeline_version_id")
        return newest["pipeline_spec"], {name: newest[name] for name in names}

    def _experiment(self, body: Row, query: Query, doing: str) -> Row:
        given = body.get("experiment_id") or query.get("experiment_id")
        if given:
            return self.get_experiment({}, given)
        known = [one for one in self.experiments.values() if one["display_name"] == "Default"]
        if not known:
            raise invalid(doing, "Experiment is missing")
        return known[0]

    def _asked(self, query: Query) -> str:
        """The namespace of a request, which may name an experiment instead."""
        experiment = self.experiments.get(query.get("experiment_id", ""), {})
        return str(query.get("namespace") or experiment.get("namespace", ""))

    def _of(self, rows: dict[str, Row], experiment_id: str, namespace: str) -> list[Row]:
        """Rows of an experiment, or of all of the namespace, with the newest last."""
        if experiment_id:
            self.get_experiment({}, experiment_id)
            return [one for one in rows.values() if one["experiment_id"] == experiment_id]
        known = self.experiments.items()
        wanted = [name for name, one in known if one.get("namespace", "") == namespace]
        return [one for one in rows.values() if one["experiment_id"] in wanted]
