"""The pipeline sweep as pods: trials at once, one of which fails, and what is handed on."""

import json

from tests.e2e.harness.scene import COMPILED, Scene
from tests.e2e.harness.training import TRAINING

TRIALS = ("train", "train-2", "train-3")


def test_trials_run_beside_one_another_and_the_best_is_evaluated(scene: Scene) -> None:
    run = scene.run(
        COMPILED.with_name("sweep.yaml"),
        **TRAINING,
        backend="local",
        job={"nproc_per_node": 1},
        sweep={"trials": [{"model": "vgg11"}, {"learning_rate": 0.05}, {"learning_rate": 0.1}]},
    ).play()
    assert run.succeeded, run.explain()
    best = run.steps["leaderboard"].outputs
    assert "train." in best["run_dir"]
    assert best["checkpoint"].startswith(best["run_dir"])
    metadata = best["sweep_metrics"].metadata
    assert (metadata["trials"], metadata["failed"]) == (3, 1)
    jobs = [json.loads(run.artifact(name, "training_job")) for name in TRIALS]
    assert sum("failure" in job for job in jobs) == 1
    assert sum("kfp_ddp" in job for job in jobs) == 2
    assert {*TRIALS, "evaluate", "gate", "teardown"} <= set(run.steps)
