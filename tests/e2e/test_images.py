"""The committed pipeline from the images as they were built, and not from this checkout."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from kfp_ddp import __version__
from kfp_ddp.core.container_images import Images
from kfp_ddp.pipelines import compiled
from tests.e2e.harness.scene import Scene
from tests.e2e.harness.training import TRAINING, WORKERS

REPOSITORY = Path(__file__).parents[2]
BUILT = REPOSITORY / "build" / "images"
# A name of its own: that of the release is this checkout's for all other tests.
REGISTRY = "images-test.local/kfp-ddp"
CLUSTER = Path(os.environ.get("KFP_DDP_CLUSTER", REPOSITORY.parent / "shared/cluster/cluster"))


@pytest.fixture(scope="module")
def registry(cluster: client.ApiClient) -> str:
    """Where the cluster has the images that were built; the trainer's without CUDA, if there is."""
    launcher = BUILT / "launcher.tar"
    trainers = [BUILT / f"{name}.tar" for name in ("trainer-cpu", "trainer")]
    trainer = next((path for path in trainers if path.exists()), None)
    if not launcher.exists() or trainer is None:
        pytest.skip(f"no images in {BUILT}: make images-test builds them")
    if not CLUSTER.exists():
        pytest.skip(f"no {CLUSTER} to import images with; KFP_DDP_CLUSTER names another program")
    for archive in (launcher, trainer):
        subprocess.run([CLUSTER, "import", archive], check=True, capture_output=True)
    return REGISTRY


def test_the_images_train_a_model(scene: Scene, registry: str, tmp_path: Path) -> None:
    images = Images.create({"registry": registry})
    (document,) = compiled.write(compiled.built_in(["train_resnet"]), tmp_path, images)
    workers: dict[str, Any] = {key: WORKERS[key] for key in WORKERS if key != "run_as_user"}
    run = scene.run(
        document,
        **TRAINING | {"sync": {"dataset": "from-images"}},
        backend="pytorchjob",
        nodes=2,
        job={**workers, "nproc_per_node": 1},
    ).play()

    assert run.succeeded, run.explain()
    assert "publish" in run.steps
    ran = json.loads(run.artifact("train", "training_job"))["kfp_ddp"]
    assert ran["version"] == __version__
    for who, image in (("step", "launcher"), ("workers", "trainer")):
        (one,) = ran[who]
        assert one["image"] == f"{registry}/{image}:{__version__}"
        assert one["digest"].startswith("sha256:")
    assert run.steps["train"].outputs["trained_model"].metadata["kfp_ddp"] == ran
