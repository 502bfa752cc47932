"""The pipelines as pods, with ranks in the train step; that of a script with two workers."""

import json
from pathlib import Path
from typing import Any

import pytest

from kfp_ddp.training import model_file
from tests.e2e.harness import bucket
from tests.e2e.harness.leftovers import claims, leftovers
from tests.e2e.harness.play import Run
from tests.e2e.harness.scene import ARTIFACTS, COMPILED, DATA, WORK, Scene
from tests.e2e.harness.training import TRAINING, WORKERS

STEPS = [
    *("preflight", "data-sync", "dataset-volume", "train"),
    *("evaluate", "export", "gate", "publish", "teardown"),
]
SCRIPT = Path(__file__).parents[2] / "examples" / "own_script.py"
TRIALS = ("train", "train-2", "train-3")
EXPORTS = f"gs://{bucket.MODELS}/nightly"
LOCAL: dict[str, Any] = {"backend": "local", "job": {"nproc_per_node": 1}}


def document(name: str) -> Path:
    return COMPILED.with_name(f"{name}.yaml")


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
        document("own_script"),
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


def test_trials_run_in_parallel_and_the_best_is_evaluated(scene: Scene) -> None:
    run = scene.run(
        document("sweep"),
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


def nightly(scene: Scene, **changed: Any) -> Run:
    arguments = {**TRAINING, **LOCAL, "destination": EXPORTS, "keep": 1, **changed}
    return scene.run(document("retrain"), **arguments).play()


@pytest.fixture(scope="module")
def first(scene: Scene) -> Run:
    return nightly(scene)


def test_champion_in_a_bucket_is_evaluated(scene: Scene, first: Run) -> None:
    assert first.succeeded, first.explain()
    run = scene.run(
        document("evaluate_checkpoint"),
        source=TRAINING["source"],
        sync=TRAINING["sync"],
        checkpoint=f"{EXPORTS}/{TRAINING['model_name']}",
    ).play()
    assert run.succeeded, run.explain()
    assert run.steps["evaluate"].outputs["accuracy"] == first.steps["evaluate"].outputs["accuracy"]
    assert scene.work.read(f"{run.id}/evaluate/evaluation/evaluation.json")


def test_a_new_setting_is_trained(scene: Scene, bucket_url: str, first: Run) -> None:
    assert first.succeeded, first.explain()
    rules = {"min_accuracy": 0.1, "min_improvement": -1.0}
    run = nightly(scene, epochs=4, gate=rules)
    assert run.succeeded, run.explain()
    assert version(run) != version(first)
    models = f"nightly/{TRAINING['model_name']}"
    names = bucket.names(bucket_url, bucket.MODELS)
    whole = {
        name.split("/")[2] for name in names if name.startswith(models) and "/_SUCCESS" in name
    }
    assert whole >= {version(first), version(run)}, "keep=1 spares what was compared with"
    notes = [name for name in names if name.startswith(f"{models}/tried/")]
    assert len(notes) == 2


def version(run: Run) -> str:
    """Return the version that a run uploaded."""
    return str(run.steps["publish"].outputs["destination"]).rpartition("/")[2]
