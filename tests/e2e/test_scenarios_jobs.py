"""What happens to a training while its step is evicted."""

import re

import pytest

from tests.e2e.harness.grounds import until
from tests.e2e.harness.running import evict
from tests.e2e.harness.scene import Scene
from tests.e2e.harness.trainings import Begin, log, starts, workers


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
