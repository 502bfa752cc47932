"""Schedules of a small pipeline, made and refused as a person would."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from click.testing import Result

from kfp_ddp.core.errors import InputError
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
Call = Callable[..., Result]


def uploaded(server: KfpServer) -> str:
    """The id of a small pipeline that the server has from now on, its one version called own."""
    data = yaml.safe_dump(OWN).encode()
    return str(server.store.upload_pipeline(data, {"name": "own"})["pipeline_id"])


def new_version(server: KfpServer, pipeline_id: str, name: str) -> str:
    data = yaml.safe_dump(OWN).encode()
    made = server.store.upload_pipeline_version(data, {"pipelineid": pipeline_id, "name": name})
    made["created_at"] = "2099-01-01T00:00:00Z"
    return str(made["pipeline_version_id"])


def create(call: Call, name: str = "nightly", *more: str) -> dict[str, Any]:
    """A schedule, as the server has it."""
    words = ("--pipeline", "own", "--cron", "0 3 * * *", "--set", "rounds=3", *more, "--json")
    done = call("schedule", "create", name, *words)
    assert done.exception is None, done.output
    return dict(json.loads(done.stdout))


def refused(call: Call, *words: str) -> str:
    """The one line that a command ends with."""
    done = call("schedule", *words)
    assert isinstance(done.exception, InputError), done.output
    return str(done.exception)


def stored(server: KfpServer) -> list[tuple[str, str, str]]:
    """The schedules of the server, oldest first: name, cron, status."""
    return [
        (one["display_name"], one["trigger"]["cron_schedule"]["cron"], one["status"])
        for one in server.store.recurring_runs.values()
    ]
