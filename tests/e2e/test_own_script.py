"""The pipeline own_script as pods: a script of one's own on two workers of a PyTorchJob."""

from pathlib import Path

from kfp_ddp.training import model_file
from tests.e2e.harness import bucket
from tests.e2e.harness.scene import COMPILED, Scene
from tests.e2e.harness.training import TRAINING, WORKERS

SCRIPT = Path(__file__).parents[2] / "examples" / "own_script.py"


def test_a_script_trains_on_two_workers(scene: Scene, bucket_url: str) -> None:
    run = scene.run(
        COMPILED.with_name("own_script.yaml"),
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
