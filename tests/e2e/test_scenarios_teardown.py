"""The exit handler deletes the jobs of its run, and no others."""

import pytest

from kfp_ddp.jobs.kinds import KINDS
from tests.e2e.harness.grounds import until
from tests.e2e.harness.launch_step import LaunchStep, python
from tests.e2e.harness.play import LOST_PODS, Run
from tests.e2e.harness.scene import Scene
from tests.e2e.harness.trainings import Begin, attempts, log, workers

pytestmark = pytest.mark.smoke


def runs(run: Run) -> int:
    return log(run).count(" is running")


def over(run: Run) -> bool:
    return run.steps["train"].succeeded is not None


@pytest.mark.parametrize("backend", ["pytorchjob", "trainjob"])
def test_the_job_of_a_lost_step_is_deleted(scene: Scene, begin: Begin, backend: str) -> None:
    """Its pod is lost more often than Argo retries it."""
    sleep = {"kind": backend, **python("import time; print('here'); time.sleep(900)")}
    other = LaunchStep(scene.grounds, sleep).start()
    run = begin(epochs=4000, backend=backend, nodes=1)
    other.saw("here")
    before = other.jobs(backend)
    for lost in range(LOST_PODS + 1):
        until(lambda lost=lost: attempts(run) > lost, "the step")  # type: ignore[misc]
        until(lambda lost=lost: over(run) or runs(run) > lost, "the job")  # type: ignore[misc]
        assert not over(run), run.explain()
        scene.grounds.core.delete_namespaced_pod(
            run.steps["train"].pod, scene.grounds.namespace, grace_period_seconds=0
        )
    left = scene.grounds.jobs(run.id, backend)
    run.wait()
    after = other.jobs(backend)
    other.terminate()

    assert {name: step.succeeded for name, step in run.steps.items()} == {
        "train": False,
        "teardown": True,
    }
    (job,) = left
    line = f"deleted {KINDS[backend].title} {job['metadata']['name']}"
    assert line in run.steps["teardown"].log, run.explain()
    assert run.steps["teardown"].outputs["Output"] == line
    assert scene.grounds.jobs(run.id, backend) == []
    until(lambda: not workers(scene, run), "the end of the workers")
    assert [job["metadata"]["uid"] for job in after] == [before[0]["metadata"]["uid"]]
    assert "deletionTimestamp" not in after[0]["metadata"]
    assert other.wait() == "Failed"
