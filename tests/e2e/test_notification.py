"""What a run came to is told from its pods, by a secret's key, to a server outside."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from kubernetes import client

from tests.e2e.harness import bucket
from tests.e2e.harness.scene import Scene
from tests.e2e.harness.training import TRAINING
from tests.serving import serving

SECRET = "tells"
JOB = {"notify_webhook": "HOOK", "kfp_ui": "https://kfp.example.com"}


@pytest.fixture
def posted(scene: Scene, cluster: client.ApiClient) -> Iterator[list[dict[str, Any]]]:
    """What the webhook gets, whose address the secret holds."""
    got: list[dict[str, Any]] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            """Say nothing."""

    server = HTTPServer(("0.0.0.0", 0), Hook)
    with serving(server):
        address = f"http://{bucket.node_address(cluster)}:{server.server_port}/hook"
        body = {"metadata": {"name": SECRET}, "stringData": {"HOOK": address}}
        scene.grounds.core.create_namespaced_secret(scene.grounds.namespace, body)
        yield got
        scene.grounds.core.delete_namespaced_secret(SECRET, scene.grounds.namespace)


def play(scene: Scene, **arguments: Any) -> Any:
    given = TRAINING | {"backend": "local", "bucket_secret": SECRET, "job": JOB} | arguments
    return scene.run(**given).play()


def test_a_step_that_fails_is_told_with_its_error(
    scene: Scene, posted: list[dict[str, Any]]
) -> None:
    run = play(scene, sync={"dataset": "told", "max_object_mb": 0.00001})
    assert run.succeeded is False, run.explain()
    (said,) = posted
    assert (said["state"], said["step"]) == ("failed", "data-sync"), said
    assert f"error: {said['reason']}" in run.steps["data-sync"].log
    assert said["address"] == f"https://kfp.example.com/#/runs/details/{run.id}"
    assert run.steps["teardown"].succeeded
    assert "notify_webhook: sent" in run.steps["teardown"].log


def test_a_run_that_preflight_refuses_is_told_by_it(
    scene: Scene, posted: list[dict[str, Any]]
) -> None:
    run = play(scene, model="resnet51")
    assert list(run.steps) == ["preflight"]
    (said,) = posted
    assert (said["state"], said["step"], said["run_id"]) == ("failed", "preflight", run.id)
    assert "did you mean 'resnet50'" in said["reason"]


def test_a_key_that_the_secret_lacks_is_refused_before_anything_runs(
    scene: Scene, posted: list[dict[str, Any]]
) -> None:
    run = play(scene, job={"notify_slack": "SLACK"})
    assert list(run.steps) == ["preflight"]
    assert "notify_slack names the key SLACK, which the bucket's secret" in run.explain()
    assert posted == []


def test_a_model_that_was_promoted_is_told_with_its_accuracy(
    scene: Scene, posted: list[dict[str, Any]]
) -> None:
    destination = f"gs://{bucket.MODELS}/told"
    job = {**JOB, "nproc_per_node": 1}
    run = play(scene, job=job, destination=destination, champion="last")
    assert run.succeeded, run.explain()
    (said,) = posted
    assert (said["state"], said["model"]) == ("promoted", "digits")
    assert said["accuracy"] >= 0.85
    assert said["bundle"].startswith(f"{destination}/digits/")
    assert said["champion_accuracy"] is None
