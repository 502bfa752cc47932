"""An API server that is killed and comes back while a step waits: it costs a pause, no more."""

import re
from typing import Any

import pytest
from kubernetes import client

from tests.e2e.harness.grounds import until, with_retries
from tests.e2e.harness.launch_step import LaunchStep, python
from tests.e2e.harness.restart import restart_api_server
from tests.e2e.harness.scene import Scene
from tests.e2e.harness.trainings import Begin, Seen, log, starts
from tests.e2e.harness.volumes import Ground, ground

__all__ = ["ground"]

pytestmark = pytest.mark.soak
COUNT = """
import time
for number in range(400):
    print("line", number)
    time.sleep(0.2)
"""
PUBLISH = """
from kfp_ddp.datasets.volume.engine import run
class Report: path = "/tmp/report.md"
print(run(volume_report=Report(), options=dict(), **{request}).claim)
"""


@pytest.mark.parametrize("kind", ["pytorchjob", "trainjob"])
def test_no_log_line_is_lost_or_moved(cluster: client.ApiClient, scene: Scene, kind: str) -> None:
    step = LaunchStep(scene.grounds, {"kind": kind, **python(COUNT)}).start()
    step.saw("] line 20")
    (before,) = step.jobs(kind)
    restart_api_server(cluster)
    assert step.wait() == "Succeeded", step.log()

    lines = [int(number) for number in re.findall(r"^\[\S+\] line (\d+)$", step.log(), re.M)]
    assert lines == list(range(400))
    (after,) = step.jobs(kind)
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert len(re.findall("^created ", step.log(), re.M)) == 1
    assert len(step.attempts) == 1
    assert step.log().splitlines()[-1] == f"DONE {after['metadata']['name']}"


def test_a_training_outlives_servers(cluster: client.ApiClient, scene: Scene, begin: Begin) -> None:
    run = begin(epochs=120)
    ever = Seen(scene, run)
    until(lambda: "epoch 3/" in log(run), "some epochs")
    restart_api_server(cluster)
    run.wait()

    assert run.succeeded, run.explain()
    assert len(run.steps["train"].attempts) == 1
    assert len(ever.stop()) == 1
    assert len(starts(scene, run)) == 1
    for epoch in range(1, 121):
        assert log(run).count(f"epoch {epoch}/120:") == 1, f"epoch {epoch}"


def test_publishing_waits_and_succeeds(cluster: client.ApiClient, ground: Ground) -> None:
    """The server goes while a writer holds up the copy, and the writer ends while it is away."""
    staging = ground.staging("standard")
    expected = {
        "dataset": "digits", "digest": "8" * 64, "path": "/data/versions/888888888888",
        "claim": staging, "publish": "clone",
    }  # fmt: skip
    with ground.pod("import time; time.sleep(25)", staging) as writer:
        until(lambda: _phase(ground, writer) == "Running", "the writer")
        with ground.pod(PUBLISH.format(request=expected)) as step:
            until(lambda: "; waiting" in _log(ground, step), "the step's wait")
            restart_api_server(cluster)
            until(lambda: _phase(ground, step) in ("Succeeded", "Failed"), "the step's end")
            assert _phase(ground, step) == "Succeeded", _log(ground, step)
            assert _log(ground, step).splitlines()[-1] == "ds-digits-888888888888"
    claim = ground.claim("ds-digits-888888888888")
    assert (claim.status.phase, claim.spec.access_modes) == ("Bound", ["ReadOnlyMany"])


def _phase(ground: Ground, pod: str) -> str:
    result: Any = with_retries(lambda: ground.core.read_namespaced_pod(pod, ground.namespace))
    return str(result.status.phase)


def _log(ground: Ground, pod: str) -> str:
    if _phase(ground, pod) == "Pending":
        return ""
    return str(with_retries(lambda: ground.core.read_namespaced_pod_log(pod, ground.namespace)))
