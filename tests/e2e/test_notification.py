"""Notifications of a run from its pods to a server outside of the cluster."""

import json
from collections.abc import Iterator
from http.server import HTTPServer
from typing import Any

import pytest
from kubernetes import client

from tests.e2e.harness import bucket
from tests.e2e.harness.scene import Scene
from tests.e2e.harness.training import TRAINING
from tests.serving import Handler, serving

SECRET = "notify"
JOB = {"notify_webhook": "HOOK", "kfp_ui": "https://kfp.example.com"}


@pytest.fixture
def webhook_requests(scene: Scene, cluster: client.ApiClient) -> Iterator[list[dict[str, Any]]]:
    """The requests to the webhook, whose address is in the secret."""
    requests: list[dict[str, Any]] = []

    class Hook(Handler):
        def do_POST(self) -> None:
            requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.answer(204)

    server = HTTPServer(("0.0.0.0", 0), Hook)
    with serving(server):
        address = f"http://{bucket.node_address(cluster)}:{server.server_port}/hook"
        body = {"metadata": {"name": SECRET}, "stringData": {"HOOK": address}}
        scene.grounds.core.create_namespaced_secret(scene.grounds.namespace, body)
        yield requests
        scene.grounds.core.delete_namespaced_secret(SECRET, scene.grounds.namespace)


def play(scene: Scene, **arguments: Any) -> Any:
    inputs = TRAINING | {"backend": "local", "bucket_secret": SECRET, "job": JOB} | arguments
    return scene.run(**inputs).play()


def test_a_failed_step_is_reported(scene: Scene, webhook_requests: list[dict[str, Any]]) -> None:
    run = play(scene, sync={"dataset": "notify", "max_object_mb": 0.00001})
    assert run.succeeded is False, run.explain()
    (body,) = webhook_requests
    assert (body["state"], body["step"]) == ("failed", "data-sync"), body
    assert f"error: {body['reason']}" in run.steps["data-sync"].log
    assert body["address"] == f"https://kfp.example.com/#/runs/details/{run.id}"
    assert run.steps["teardown"].succeeded
    assert "notify_webhook: sent" in run.steps["teardown"].log


def test_preflight_reports_a_rejected_run(
    scene: Scene, webhook_requests: list[dict[str, Any]]
) -> None:
    run = play(scene, model="resnet51")
    assert list(run.steps) == ["preflight"]
    (body,) = webhook_requests
    assert (body["state"], body["step"], body["run_id"]) == ("failed", "preflight", run.id)
    assert "did you mean 'resnet50'" in body["reason"]


def test_a_promoted_model_is_reported(scene: Scene, webhook_requests: list[dict[str, Any]]) -> None:
    destination = f"gs://{bucket.MODELS}/notify"
    job = {**JOB, "nproc_per_node": 1}
    run = play(scene, job=job, destination=destination, champion="last")
    assert run.succeeded, run.explain()
    (body,) = webhook_requests
    assert (body["state"], body["model"]) == ("promoted", "digits")
    assert body["accuracy"] >= 0.85
    assert body["bundle"].startswith(f"{destination}/digits/")
    assert body["champion_accuracy"] is None
