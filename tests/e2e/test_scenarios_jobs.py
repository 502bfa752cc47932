"""What becomes of a job whose step is evicted, lost or killed at random."""

import random
import re
import time

import pytest

from kfp_ddp.jobs.kinds import KINDS
from tests.e2e.harness.grounds import until
from tests.e2e.harness.launch_step import LaunchStep, python
from tests.e2e.harness.play import LOST_PODS, Run
from tests.e2e.harness.running import evict
from tests.e2e.harness.scene import Scene
from tests.e2e.harness.trainings import Begin, Seen, attempts, log, starts, workers

STEPS = 12  # of an epoch: 400 images, 32 a batch, the last short one dropped


@pytest.mark.smoke
def test_an_evicted_launcher_reports_the_step_of_a_retry(scene: Scene, begin: Begin) -> None:
    """Argo saw its pod fail before it was gone: the exit handler deletes the job, ranks save."""
    # The longest that was measured: what is said is looked at, not how soon.
    run = begin(epochs=60, checkpoint_epochs=2, grace=0.72)
    until(lambda: "epoch 9/" in log(run) or run.succeeded is not None, "checkpoints", 240)
    assert run.succeeded is None, run.explain()
    evict(scene.grounds, run.steps["train"].pod, seen=True)
    run.wait()

    assert run.succeeded is False
    step = run.steps["train"]
    assert len(step.attempts) == 1
    line = re.search(r"launcher was evicted; Retry resumes from step (\d+) or later", log(run))
    assert line is not None, run.explain()
    assert step.attempts[0].error == f"main: Error (exit code 143): {line[0]}"
    assert run.steps["teardown"].succeeded, run.explain()
    until(lambda: not workers(scene, run), "the last checkpoint of the ranks", 180)
    stopped = scene.events(run)[-1]
    assert (stopped["event"], stopped["status"]) == ("end", "preempted")
    assert int(line[1]) > 0
    assert stopped["step"] >= int(line[1])

    again = run.retried().play()
    assert again.succeeded, again.explain()
    assert starts(scene, run)[-1]["resumed_from_step"] == stopped["step"]
    assert scene.events(run)[-1]["status"] == "done"


def runs(run: Run) -> int:
    return log(run).count(" is running")


def over(run: Run) -> bool:
    return run.steps["train"].succeeded is not None


@pytest.mark.smoke
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
    remaining = scene.grounds.jobs(run.id, backend)
    run.wait()
    after = other.jobs(backend)
    other.terminate()

    assert {name: step.succeeded for name, step in run.steps.items()} == {
        "train": False,
        "teardown": True,
    }
    (job,) = remaining
    line = f"deleted {KINDS[backend].title} {job['metadata']['name']}"
    assert line in run.steps["teardown"].log, run.explain()
    assert run.steps["teardown"].outputs["Output"] == line
    assert scene.grounds.jobs(run.id, backend) == []
    until(lambda: not workers(scene, run), "the end of the workers")
    assert [job["metadata"]["uid"] for job in after] == [before[0]["metadata"]["uid"]]
    assert "deletionTimestamp" not in after[0]["metadata"]
    assert other.wait() == "Failed"


@pytest.mark.soak
def test_training_resumes_after_a_drain(scene: Scene, begin: Begin) -> None:
    """Both the step and the workers are evicted, through the API that `kubectl drain` calls."""
    run = begin(epochs=40)
    until(lambda: "epoch 7/" in log(run), "a checkpoint")
    for pod in [*workers(scene, run), run.steps["train"].pod]:
        scene.grounds.core.create_namespaced_pod_eviction(
            pod, scene.grounds.namespace, {"metadata": {"name": pod}}
        )
    run.wait()

    assert run.succeeded, run.explain()
    assert len(run.steps["train"].attempts) == 2
    assert starts(scene, run)[-1]["resumed_from_step"] > 0


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10))
def test_step_killed_at_random_times(scene: Scene, begin: Begin, seed: int) -> None:
    """The step, a worker or both lose their pods: the same end as without."""
    draw = random.Random(seed)
    run = begin(epochs=40)
    ever = Seen(scene, run)
    until(lambda: attempts(run) > 0, "the step")
    for victim in draw.sample(["step", "worker", "step"], k=2):
        time.sleep(draw.uniform(0, 12))
        result = workers(scene, run) if victim == "worker" else [run.steps["train"].pod]
        if result and run.succeeded is None:
            scene.grounds.core.delete_namespaced_pod(
                draw.choice(result), scene.grounds.namespace, grace_period_seconds=0
            )
    run.wait()

    assert run.succeeded, run.explain()
    ever.stop()
    assert ever.at_once == 1
    last = scene.events(run)[-1]
    assert (last["event"], last["status"], last["step"]) == ("end", "done", 40 * STEPS)
