"""Pipelines, their versions and experiments, in memory.

Each operation of the contract is a method of its name.
"""

import uuid
from datetime import UTC, datetime
from typing import Any

from tests.kfp_server import specs
from tests.kfp_server.listing import page
from tests.kfp_server.refusal import gateway, invalid, taken, unknown, upload

Row = dict[str, Any]
Query = dict[str, str]
NEVER = "1970-01-01T00:00:00Z"


def now() -> str:
    """As the server writes it: to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Catalog:
    """What runs are made of."""

    def __init__(self, multi_user: bool = False, version: str = "2.17.0") -> None:
        self.multi_user, self.version = multi_user, version
        self.namespaces = ["kubeflow-user"]
        """Those that the user may act in, where the server knows users."""
        self.pipelines: dict[str, Row] = {}
        self.versions: dict[str, Row] = {}
        self.experiments: dict[str, Row] = {}
        if not multi_user:
            self.create_experiment({"display_name": "Default"}, {})

    def get_healthz(self, _: Query) -> Row:
        return {
            "commit_sha": "4a3592cb2dd0",
            "tag_name": self.version,
            "multi_user": self.multi_user,
            "pipeline_store": "database",
        }

    def upload_pipeline(self, data: bytes, query: Query) -> Row:
        spec, name = self._uploaded(data, query)
        if any(one["name"] == name for one in self.pipelines.values()):
            raise upload(409, "Failed to create a pipeline and a pipeline version")
        pipeline = self.create_pipeline({**query, "name": name}, {})
        self._version(pipeline["pipeline_id"], name, spec, query)
        return pipeline

    def create_pipeline(self, body: Row, query: Query) -> Row:
        name = body.get("name") or body.get("display_name", "")
        namespace = self._shared(body.get("namespace", ""), "create a pipeline")
        if any(one["name"] == name for one in self.pipelines.values()):
            raise taken("pipeline", name)
        pipeline = {
            "pipeline_id": str(uuid.uuid4()),
            "display_name": body.get("display_name") or name,
            "name": name,
            "created_at": now(),
            **filled(body, "description"),
            **({"namespace": namespace} if namespace else {}),
        }
        self.pipelines[pipeline["pipeline_id"]] = pipeline
        return pipeline

    def upload_pipeline_version(self, data: bytes, query: Query) -> Row:
        spec, name = self._uploaded(data, query)
        pipeline_id = query.get("pipelineid", "")
        if pipeline_id not in self.pipelines:
            raise upload(400, "Failed to upload a pipeline version")
        if any(one["name"] == name for one in self._versions_of(pipeline_id)):
            raise upload(409, "Failed to upload a pipeline version")
        return self._version(pipeline_id, name, spec, query)

    def get_pipeline(self, query: Query, pipeline_id: str) -> Row:
        if pipeline_id not in self.pipelines:
            raise unknown("Pipeline", pipeline_id)
        return self.pipelines[pipeline_id]

    def list_pipelines(self, query: Query) -> Row:
        namespace = self._shared(query.get("namespace", ""), "list pipelines")
        rows = [one for one in self.pipelines.values() if one.get("namespace", "") == namespace]
        return page("pipelines", rows, query, "list pipelines")

    def delete_pipeline(self, query: Query, pipeline_id: str) -> Row:
        self.get_pipeline(query, pipeline_id)
        versions = self._versions_of(pipeline_id)
        if versions and query.get("cascade") != "true":
            raise invalid(
                "delete a pipeline",
                f"Failed to delete pipeline {pipeline_id} as it has existing pipeline versions "
                f"(count: {len(versions)})",
            )
        for one in versions:
            del self.versions[one["pipeline_version_id"]]
        del self.pipelines[pipeline_id]
        return {}

    def get_pipeline_version(self, query: Query, pipeline_id: str, pipeline_version_id: str) -> Row:
        known = self.versions.get(pipeline_version_id)
        if not known or known["pipeline_id"] != pipeline_id:
            raise unknown("PipelineVersion", pipeline_version_id)
        return known

    def list_pipeline_versions(self, query: Query, pipeline_id: str) -> Row:
        self.get_pipeline(query, pipeline_id)
        rows = self._versions_of(pipeline_id)
        return page("pipeline_versions", rows, query, "list pipeline versions")

    def _uploaded(self, data: bytes, query: Query) -> tuple[Row, str]:
        """A pipeline, and the name that it was given or has."""
        spec = specs.read(data)
        if spec is None:
            raise upload(400, "unknown template format")
        return spec, query.get("name") or spec.get("pipeline_spec", spec)["pipelineInfo"]["name"]

    def _version(self, pipeline_id: str, name: str, spec: Row, query: Query) -> Row:
        version = {
            "pipeline_id": pipeline_id,
            "pipeline_version_id": str(uuid.uuid4()),
            "display_name": query.get("display_name") or name,
            "name": name,
            "created_at": now(),
            "pipeline_spec": spec,
            **filled(query, "description"),
        }
        self.versions[version["pipeline_version_id"]] = version
        return version

    def _versions_of(self, pipeline_id: str) -> list[Row]:
        return [one for one in self.versions.values() if one["pipeline_id"] == pipeline_id]

    def create_experiment(self, body: Row, query: Query) -> Row:
        namespace = self._namespace(body.get("namespace", ""), "create a experiment")
        name = body.get("display_name", "")
        if not name:
            raise invalid("create a experiment", "Experiment has an empty name")
        for one in self.experiments.values():
            if one["display_name"] == name and one.get("namespace", "") == namespace:
                raise taken("experiment", name)
        experiment = {
            "experiment_id": str(uuid.uuid4()),
            "display_name": name,
            **filled(body, "description"),
            "created_at": now(),
            "storage_state": "AVAILABLE",
            "last_run_created_at": NEVER,
            **({"namespace": namespace} if namespace else {}),
        }
        self.experiments[experiment["experiment_id"]] = experiment
        return experiment

    def get_experiment(self, query: Query, experiment_id: str) -> Row:
        if experiment_id not in self.experiments:
            raise unknown("Experiment", experiment_id)
        return self.experiments[experiment_id]

    def list_experiments(self, query: Query) -> Row:
        namespace = self._namespace(query.get("namespace", ""), "list experiments")
        rows = [e for e in self.experiments.values() if e.get("namespace", "") == namespace]
        return page("experiments", rows, query, "list experiments")

    def _shared(self, given: str, doing: str) -> str:
        """As `_namespace`, but for what may be shared by all users, where none is given."""
        return self._namespace(given, doing) if given else ""

    def _namespace(self, given: str, doing: str) -> str:
        """The namespace of a request: none where there is one user, else one of the user's."""
        if not self.multi_user:
            return ""
        if not given:
            raise invalid(doing, "Namespace cannot be empty in multi-user mode")
        if given not in self.namespaces:
            raise gateway(
                403,
                f"Failed to {doing}: Failed to authorize with API: PermissionDenied",
                f"User 'user@example.com' is not authorized in namespace {given}",
            )
        return given


def filled(given: Row, name: str) -> Row:
    """A field, where it was given."""
    return {name: given[name]} if given.get(name) else {}
