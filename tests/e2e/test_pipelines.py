"""The pipelines retrain and evaluate_checkpoint as pods."""

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import bucket
from tests.e2e.harness.play import Run
from tests.e2e.harness.scene import COMPILED, Scene
from tests.e2e.harness.training import TRAINING

EXPORTS = f"gs://{bucket.MODELS}/nightly"
LOCAL: dict[str, Any] = {"backend": "local", "job": {"nproc_per_node": 1}}


def document(name: str) -> Path:
    return COMPILED.with_name(f"{name}.yaml")


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
