"""Longer scenarios: runs side by side, drained nodes, random kills."""

import random
import time

import pytest

from tests.e2e.harness.grounds import until
from tests.e2e.harness.scene import Scene
from tests.e2e.harness.trainings import Begin, Seen, attempts, log, starts, workers

pytestmark = pytest.mark.soak
STEPS = 12  # of an epoch: 400 images, 32 a batch, the last short one dropped


def test_a_drained_node_costs_a_pause(scene: Scene, begin: Begin) -> None:
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


@pytest.mark.parametrize("seed", range(10))
def test_killed_at_random_instants(scene: Scene, begin: Begin, seed: int) -> None:
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
