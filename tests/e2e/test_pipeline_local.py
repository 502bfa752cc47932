"""The committed pipeline as pods, with the ranks in the train step itself."""

from tests.e2e.harness import bucket
from tests.e2e.harness.leftovers import claims, leftovers
from tests.e2e.harness.play import Run
from tests.e2e.harness.scene import ARTIFACTS, DATA, WORK, Scene
from tests.e2e.harness.training import TRAINING

STEPS = [
    *("preflight", "data-sync", "dataset-volume", "train"),
    *("evaluate", "export", "gate", "publish", "teardown"),
]


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
    left = {name for name in leftovers(scene.grounds) if "volumesnapshots/ds-" not in name}
    assert left == set()
    assert {name for name in claims(scene.grounds) if not name.startswith("ds-")} == {
        DATA,
        WORK,
        ARTIFACTS,
    }
