"""The committed pipeline as pods, with the ranks in the train step itself."""

from tests.e2e.harness.fixtures import TRAINING, bucket_url, cluster, scene  # noqa: F401
from tests.e2e.harness.scene import Scene


def test_bucket_to_exported_model(scene: Scene, bucket_url: str) -> None:  # noqa: F811
    run = scene.run(**TRAINING, backend="local", nproc_per_node=2).play()

    assert run.succeeded, run.explain()
    print({n: s.outputs for n, s in run.steps.items()})
    print(run.explain())
