"""The pipelines as pods, with ranks in the train step or two workers, and their notifications."""

import json
from collections.abc import Iterator
from http.server import HTTPServer
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from kfp_ddp.training.spec import model_file
from tests.e2e.harness import bucket
from tests.e2e.harness.grounds import until
from tests.e2e.harness.leftovers import claims, leftovers
from tests.e2e.harness.namespace import DATA, WORK
from tests.e2e.harness.play import Run
from tests.e2e.harness.scene import ARTIFACTS, COMPILED, Scene
from tests.e2e.harness.training import TRAINING, WORKERS
from tests.serving import Handler, serving

STEPS = [
    *("preflight", "data-sync", "dataset-volume", "train"),
    *("evaluate", "export", "gate", "publish", "teardown"),
]
SCRIPT = Path(__file__).parents[2] / "examples" / "own_script.py"
SECRET = "notify"
JOB = {"notify_webhook": "HOOK", "kfp_ui": "https://kfp.example.com"}


def test_bucket_to_exported_model(scene: Scene, bucket_url: str, local_run: Run) -> None:
    assert local_run.succeeded, local_run.explain()
    assert list(local_run.steps) == STEPS
    synced, evaluated = local_run.steps["data-sync"], local_run.steps["evaluate"]
    version = synced.outputs["path"].removeprefix("/data/")
    assert scene.data.read(f"{version}/_SUCCESS") == synced.outputs["digest"].encode() + b"\n"
    assert evaluated.outputs["accuracy"] >= TRAINING["gate"]["min_accuracy"]
    assert b"<svg" in local_run.artifact("train", "loss_curve")
    exported = bucket.names(bucket_url, bucket.MODELS)
    assert any(name.endswith("/_SUCCESS") for name in exported), exported
    # Versions that the tests of the job backends published here stay, as they should.
    names = {name for name in leftovers(scene.grounds) if "volumesnapshots/ds-" not in name}
    assert names == set()
    assert {name for name in claims(scene.grounds) if not name.startswith("ds-")} == {
        DATA,
        WORK,
        ARTIFACTS,
    }


def test_a_script_trains_on_two_workers(scene: Scene, bucket_url: str) -> None:
    run = scene.run(
        COMPILED.with_name("own_script.yaml"),
        **TRAINING
        | {
            "script": model_file.pack(SCRIPT),
            "model": "own_script.py:build",
            "training": {"image_size": 16, "script_args": "--momentum 0.8"},
            "gate": {"min_accuracy": 0.2},
            "destination": f"gs://{bucket.MODELS}/own",
        },
        nodes=2,
        job={**WORKERS, "nproc_per_node": 1},
    ).play()
    assert run.succeeded, run.explain()
    assert "epoch 20: loss" in run.steps["train"].log
    exported = {name.partition("/")[2] for name in bucket.names(bucket_url, bucket.MODELS)}
    assert any(name.startswith("digits/") and name.endswith("/network.py") for name in exported)


@pytest.mark.smoke
def test_a_lost_sweep_adopts_its_jobs(scene: Scene, bucket_url: str) -> None:
    space = {"learning_rate": {"min": 0.02, "max": 0.3, "log": True}}
    halving = {"reduction_factor": 3, "min_epochs": 2, "parallel_trials": 2}
    run = scene.run(
        COMPILED.with_name("sweep.yaml"),
        **TRAINING | {"epochs": 18, "gate": {"min_accuracy": 0.2}},
        sweep={"space": space, "samples": 6, "sampler": "tpe", **halving},
        backend="pytorchjob",
        job={**WORKERS, "nproc_per_node": 1},
    ).start()
    grounds = scene.grounds
    until(lambda: len(grounds.workers(run.id)) > 1 or run.succeeded is not None, "two trials", 300)
    assert run.succeeded is None, run.explain()
    grounds.core.delete_namespaced_pod(
        run.steps["tune"].pod, grounds.namespace, grace_period_seconds=0
    )
    run.wait(1500)
    assert run.succeeded, run.explain()
    step = run.steps["tune"]
    assert len(step.attempts) == 2
    assert "adopting PyTorchJob" in step.log
    table = run.artifact("tune", "sweep_summary").decode()
    assert len(table.splitlines()) == 2 + 6
    assert b"<svg" in run.artifact("tune", "sweep_report")
    # Six at the first rung, two of them at the second, and one of these to the end.
    files = [f"{run.id}/tune.{trial}/metrics.jsonl" for trial in range(6)]
    started = [one for file in files for one in scene.work.events(file) if one["event"] == "start"]
    assert len(started) == 6 + 2 + 1


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


def test_preflight_reports_rejections(scene: Scene, webhook_requests: list[dict[str, Any]]) -> None:
    run = play(scene, model="resnet51")
    assert list(run.steps) == ["preflight"]
    (body,) = webhook_requests
    assert (body["state"], body["step"], body["run_id"]) == ("failed", "preflight", run.id)
    assert "did you mean 'resnet50'" in body["reason"]
