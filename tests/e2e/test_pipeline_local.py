"""The committed pipeline as pods, with the ranks in the train step itself."""

from tests.e2e.harness import bucket
from tests.e2e.harness.leftovers import claims, leftovers
from tests.e2e.harness.play import Run
from tests.e2e.harness.scene import ARTIFACTS, DATA, WORK, Scene
from tests.e2e.harness.training import LOOP, TRAINING

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


def test_second_run_copies_nothing_and_a_bad_model_is_not_exported(
    scene: Scene,
    local_run: Run,
) -> None:
    arguments = TRAINING | {"epochs": 1, "gate": {"min_accuracy": 0.999}}
    arguments["training"] = {**LOOP, "warmup_epochs": 0.0}
    run = scene.run(**arguments, backend="local").play()

    assert run.succeeded, run.explain()
    assert list(run.steps) == [step for step in STEPS if step != "publish"]
    for output in ("digest", "path"):
        before = local_run.steps["data-sync"].outputs[output]
        assert run.steps["data-sync"].outputs[output] == before
    assert "unchanged" in run.steps["data-sync"].log
    before = local_run.steps["dataset-volume"].outputs["claim"]
    assert run.steps["dataset-volume"].outputs["claim"] == before


def test_a_missing_bucket_is_one_line_and_the_exit_handler_still_runs(
    scene: Scene,
) -> None:
    run = scene.run(**TRAINING | {"source": "gs://nowhere"}, backend="local").play()

    assert run.succeeded is False
    assert {name: step.succeeded for name, step in run.steps.items()} == {
        "preflight": True,
        "data-sync": False,
        "teardown": True,
    }
    log = run.steps["data-sync"].log
    assert "Traceback" not in log
    assert "error: bucket 'nowhere'" in log.splitlines()[-1]
