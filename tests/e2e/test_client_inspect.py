"""`logs`, `describe` and `download` of a run whose pods and claim are on a cluster."""

import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from kubernetes import client

from kfp_ddp.cli import app
from kfp_ddp.client.kfp.steps import Step
from kfp_ddp.client.run import follow
from kfp_ddp.client.run.run_info import RunFinder
from kfp_ddp.core.config import Connection
from kfp_ddp.core.container_images import REGISTRY
from kfp_ddp.k8s.pods import NODE_NAME
from kfp_ddp.models import bundle
from tests.conftest import CHECKOUT
from tests.e2e.harness import step_pod
from tests.e2e.harness.grounds import IMAGE, Grounds, claim, until, wait_for_end
from tests.e2e.harness.namespace import WORK, namespace
from tests.e2e.harness.play import Run
from tests.e2e.harness.scene import Scene
from tests.kfp_server.server import KfpServer, serving

FAILED, RUN = "run_get_failed", "8fa2b9a1-6d87-4473-ad43-69c2efa3bcc0"
WORKFLOW = "train-resnet-pxrp4"
LEAVE = f"""
import sys; sys.path.insert(0, '/checkout')
from pathlib import Path
from tests import run_output
run_output.task(Path('/work/{RUN}/train'), ('train', 'evaluate', 'export'), 90, {{'epochs': 2}})
"""


def pod(
    grounds: Grounds, step: str, program: str, run: str = RUN, image: str = IMAGE, cpu: str = "0"
) -> str:
    """Start a pod as Argo labels that of a step's executor; return its name."""
    name = f"{WORKFLOW}-{step}"
    body = step_pod.bare(name, ["python3", "-u", "-c", program], image)
    body["metadata"]["labels"]["pipeline/runid"] = run
    body["metadata"]["annotations"][NODE_NAME] = f"{WORKFLOW}(0).root(0).{step}(0).executor(0)"
    body["spec"]["containers"][0]["resources"] = {"requests": {"cpu": cpu}}
    grounds.core.create_namespaced_pod(grounds.namespace, body)
    return name


@pytest.fixture(scope="module")
def grounds(cluster: client.ApiClient) -> Iterator[Grounds]:
    """A namespace with the pods of a run that failed, and what it left on its claim."""
    with namespace(cluster) as ground:
        claim(ground, WORK)
        synced = pod(ground, "data-sync", "print('600 files')")
        script = "print('step 1'); print('error: master-0: rank 1: no room'); raise SystemExit(1)"
        trained = pod(ground, "train", script)
        program = LEAVE.replace("/checkout", str(CHECKOUT))
        step_pod.run(ground, "left", ["python3", "-c", program], work=WORK)
        for name in (synced, trained):
            wait_for_end(ground, name)
        yield ground


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[KfpServer]:
    """A KFP server that knows the run, but not its images: then they are the configured ones."""
    monkeypatch.setenv("KFP_DDP_REGISTRY", REGISTRY)
    with serving() as kfp:
        kfp.record(FAILED, runtime_config={"parameters": {"work_claim": WORK}})
        yield kfp
    assert not kfp.violations


def call(grounds: Grounds, server: KfpServer, *words: str) -> Result:
    """Return the result of a command."""
    where = ["--host", server.url, "--namespace", grounds.namespace]
    answer = CliRunner().invoke(app, [*words, *where])
    assert answer.exit_code == 0, (answer.output, answer.exception)
    return answer


def set_teardown_running(server: KfpServer) -> Any:
    """Return the run, changed to one whose teardown runs."""
    run = server.store.runs[RUN]
    run["state"] = "RUNNING"
    for task in run["run_details"]["task_details"]:
        if task["display_name"] != "teardown-driver" and task["end_time"] > "2026-11-21T22:55:42Z":
            task["state"] = "RUNNING"
    return run


def readers(grounds: Grounds) -> list[str]:
    """Return the names of pods that serve downloads."""
    document = grounds.core.list_namespaced_pod(grounds.namespace, label_selector="kfp-ddp/reads")
    return [one.metadata.name for one in document.items]


def test_a_failed_run_is_described_with_its_cause(grounds: Grounds, server: KfpServer) -> None:
    document = json.loads(call(grounds, server, "describe", "shapes-1", "--json").stdout)
    assert document["step"] == "train"
    assert document["cause"] == "master-0: rank 1: no room"
    assert [one["checkpoint"] for one in document["trainings"]] == [40]
    assert document["next"] == ["kfp-ddp logs 8fa2b9a1 train", "kfp-ddp retry 8fa2b9a1"]
    assert document["notes"] == []
    assert readers(grounds) == []


def test_logs_of_one_step_or_of_all(grounds: Grounds, server: KfpServer) -> None:
    assert call(grounds, server, "logs", RUN, "data-sync").stdout == "600 files\n"
    every = call(grounds, server, "logs", RUN)
    assert "[data-sync] 600 files\n[train] step 1\n[train] error:" in every.stdout
    assert "the pod of preflight was deleted" in every.stderr


def test_bundle_is_copied_from_the_pvc(grounds: Grounds, server: KfpServer, tmp_path: Any) -> None:
    to = str(tmp_path / "model")
    answer = call(grounds, server, "download", RUN, "--output", to, "--json")
    (task,) = json.loads(answer.stdout)["tasks"]
    assert (tmp_path / "model" / "bundle" / "model.onnx").stat().st_size == 100_000
    assert task["report"] == f"{to}/evaluation/report.html"
    assert readers(grounds) == []


def test_a_pod_that_does_not_start_is_explained(grounds: Grounds, server: KfpServer) -> None:
    set_teardown_running(server)
    name = pod(grounds, "teardown", "", image="No/Such:1")
    try:

        def shown() -> Any:
            document = json.loads(
                call(grounds, server, "describe", RUN, "--no-files", "--json").stdout
            )
            return document if document["events"] and "pull" in str(document["waiting"]) else None

        document = until(shown, "a warning, and why the pod waits")
    finally:
        # The next test makes a pod of the same name.
        grounds.core.delete_namespaced_pod(name, grounds.namespace, grace_period_seconds=0)
    assert document["waiting"][0]["pod"] == name
    assert "cannot pull No/Such:1" in document["waiting"][0]["reason"]
    assert document["events"][0]["object"] == name
    assert "kfp-ddp doctor" in document["next"]


def test_follow_prints_all_lines_and_ends_with_the_run(grounds: Grounds, server: KfpServer) -> None:
    """The step is there before its pod is, and the pod before it writes."""
    run = set_teardown_running(server)
    executor = "print('[KFP Executor now INFO]: Got executor_input:'); print('{'); print('}')\n"
    program = f"{executor}import time\nfor n in range(20): print('line', n); time.sleep(0.3)"

    def end_later() -> None:
        time.sleep(1)
        try:
            wait_for_end(grounds, pod(grounds, "teardown", program))
        finally:  # without an end, the followed run would wait for ever
            run["state"] = "FAILED"

    thread = Thread(target=end_later)
    thread.start()
    try:
        answer = call(grounds, server, "logs", RUN, "teardown", "-f")
    finally:
        thread.join()
    assert answer.stdout.splitlines() == [f"line {n}" for n in range(20)]


def test_progress_or_the_reason_to_wait(grounds: Grounds, monkeypatch: pytest.MonkeyPatch) -> None:
    line = "step 5/90 · loss 2.103 · 500 images/s · ETA 0:17"
    lines = ("[rank0]:step 5/90: loss 2.1, 500 images/s", f"2026-11-22T10:00:00Z {line}", "saved")
    program = f"print('{chr(92)}n'.join({lines!r})); import time; time.sleep(600)"
    names = [
        pod(grounds, "writes", program, run="b"),
        pod(grounds, "waits", "", run="b", cpu="500"),
    ]
    monkeypatch.setattr(follow, "PROGRESS_SECONDS", 0.0)
    finder = RunFinder(Connection(namespace=grounds.namespace))
    vars(finder)["client"] = SimpleNamespace(multi_user=False)
    cluster = follow.RunCluster(finder, "b")
    writes, waits = (Step(name, name, "RUNNING", datetime.now(UTC)) for name in ("writes", "waits"))
    until(lambda: cluster.progress(writes) == line, "the line of progress")
    until(lambda: "Insufficient cpu" in cluster.progress(waits), "the reason")
    assert cluster.nodes() == []
    for name in names:
        grounds.core.delete_namespaced_pod(name, grounds.namespace)


def test_run_is_inspected(scene: Scene, local_run: Run, server: KfpServer, tmp_path: Path) -> None:
    assert local_run.succeeded, local_run.explain()
    given = {"parameters": {"work_claim": WORK}}
    server.record("run_get_succeeded", run_id=local_run.id, runtime_config=given)

    described = json.loads(call(scene.grounds, server, "describe", local_run.id, "--json").stdout)
    (trained,) = described["trainings"]
    assert trained["verdict"].startswith("blessed")
    assert trained["checkpoint"] > 0

    compared = json.loads(call(scene.grounds, server, "compare", local_run.id, "--json").stdout)
    (figure,) = compared["metrics"]["accuracy"]
    assert figure["value"] == pytest.approx(local_run.steps["evaluate"].outputs["accuracy"])

    words = ("download", local_run.id, "--output", str(tmp_path / "model"), "--checkpoint")
    call(scene.grounds, server, *words)
    assert bundle.intact(tmp_path / "model" / "bundle")
    assert readers(scene.grounds) == []
