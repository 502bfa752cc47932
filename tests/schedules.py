"""Schedules of a small pipeline, created as a user does."""

from pathlib import Path
from typing import Any

import yaml

from tests.commands import document
from tests.kfp_server.server import KfpServer

COMPILED = Path(__file__).parents[1] / "kfp_ddp" / "compiled" / "train_resnet.yaml"
OWN: dict[str, Any] = {
    "pipelineInfo": {"name": "own"},
    "schemaVersion": "2.1.0",
    "root": {
        "dag": {"tasks": {"only": {"componentRef": {"name": "comp-only"}}}},
        "inputDefinitions": {
            "parameters": {
                "rounds": {"parameterType": "NUMBER_INTEGER"},
                "rate": {"parameterType": "NUMBER_DOUBLE", "defaultValue": 0.1},
                "training": {"parameterType": "STRUCT", "defaultValue": {"a": 1}},
            }
        },
    },
    "components": {"comp-only": {"executorLabel": "exec-only"}},
    "deploymentSpec": {"executors": {"exec-only": {"container": {"image": "busybox"}}}},
}


def uploaded(server: KfpServer) -> str:
    """Upload a small pipeline with one version, called own, and return its id."""
    data = yaml.safe_dump(OWN).encode()
    return str(server.store.upload_pipeline(data, {"name": "own"})["pipeline_id"])


def new_version(server: KfpServer, pipeline_id: str, name: str) -> str:
    data = yaml.safe_dump(OWN).encode()
    made = server.store.upload_pipeline_version(data, {"pipelineid": pipeline_id, "name": name})
    made["created_at"] = "2099-01-01T00:00:00Z"
    return str(made["pipeline_version_id"])


def create(name: str = "nightly", *more: str) -> dict[str, Any]:
    """Return a new schedule, as the server has it."""
    words = ("--pipeline", "own", "--cron", "0 3 * * *", "--set", "rounds=3", *more)
    return dict(document("schedule", "create", name, *words))


def stored(server: KfpServer) -> list[tuple[str, str, str]]:
    """Return name, cron and status of the schedules of the server, oldest first."""
    return [
        (one["display_name"], one["trigger"]["cron_schedule"]["cron"], one["status"])
        for one in server.store.recurring_runs.values()
    ]
