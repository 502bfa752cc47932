"""The committed pipeline as pods, with two worker pods that an operator makes."""

from typing import Any

import pytest

from tests.e2e.harness import bucket, workflow
from tests.e2e.harness.grounds import until
from tests.e2e.harness.leftovers import claims, leftovers
from tests.e2e.harness.play import Run
from tests.e2e.harness.scene import WORK, Scene
from tests.e2e.harness.training import TRAINING, WORKERS

pytestmark = pytest.mark.smoke


@pytest.mark.parametrize(
    ("backend", "publish", "evaluation"),
    [
        ("pytorchjob", "clone", {}),
        (
            "trainjob",
            "snapshot",
            {"evaluate_backend": "trainjob", "evaluate_nodes": 2, "evaluate_cpu": "1"},
        ),
    ],
)
def test_two_workers_over_the_pod_network(
    scene: Scene,
    bucket_url: str,
    local_run: Run,
    backend: str,
    publish: str,
    evaluation: dict[str, Any],
) -> None:
    before = claims(scene.grounds)
    destination = f"gs://{bucket.MODELS}/{backend}"
    run = scene.run(
        **TRAINING | {"destination": destination, "sync": {"dataset": publish, "publish": publish}},
        backend=backend,
        nodes=2,
        job={**WORKERS, **evaluation, "nproc_per_node": 1},
    ).start()
    pods = until(lambda: _workers(scene, run) or run.succeeded is not None, "two workers", 300)
    assert isinstance(pods, list), run.explain()
    run.wait()

    assert run.succeeded, run.explain()
    published = run.steps["dataset-volume"].outputs["claim"]
    assert _modes(scene, published) == ["ReadOnlyMany"]
    for pod in pods:
        assert _mounts(pod) == {"/data": (published, True), "/work": (WORK, None)}
    log = run.steps["train"].log
    for rank in (0, 1):
        assert f"rank {rank} of 2 on" in log, log
    if evaluation:
        assert "created TrainJob" in run.steps["evaluate"].log, run.steps["evaluate"].log
    assert _last_evaluation(scene, run) == pytest.approx(_last_evaluation(scene, local_run))
    assert any(n.startswith(f"{backend}/") for n in bucket.names(bucket_url, bucket.MODELS))
    assert claims(scene.grounds) == before | {published}

    _delete_run(scene, run)
    ours = f"volumesnapshots/{published}"  # the published claim keeps the snapshot it came from
    until(lambda: leftovers(scene.grounds) <= {ours}, "the end of what the run owns")


def _workers(scene: Scene, run: Run) -> list[Any] | None:
    """Return the job's pods once two of them run."""
    running = [pod for pod in scene.grounds.workers(run.id) if pod.status.phase == "Running"]
    return running if len(running) == 2 else None


def _modes(scene: Scene, claim: str) -> list[str]:
    space = scene.grounds.namespace
    result = scene.grounds.core.read_namespaced_persistent_volume_claim(claim, space)
    modes: list[str] = result.spec.access_modes
    return modes


def _mounts(pod: Any) -> dict[str, tuple[str, bool | None]]:
    """Claim and read-only flag by mount path."""
    claims = {
        volume.name: volume.persistent_volume_claim.claim_name
        for volume in pod.spec.volumes
        if volume.persistent_volume_claim
    }
    return {
        mount.mount_path: (claims[mount.name], mount.read_only)
        for mount in pod.spec.containers[0].volume_mounts
        if mount.name in claims
    }


def _last_evaluation(scene: Scene, run: Run) -> tuple[int, float, float]:
    last = [event for event in scene.events(run) if event["event"] == "eval"][-1]
    return last["step"], last["loss"], last["accuracy"]


def _delete_run(scene: Scene, run: Run) -> None:
    """What KFP does when a run is deleted: its Workflow goes, and the cluster collects the rest."""
    scene.grounds.custom.delete_namespaced_custom_object(
        workflow.GROUP,
        workflow.VERSION,
        scene.grounds.namespace,
        workflow.PLURAL,
        run.workflow["metadata"]["name"],
        propagation_policy="Background",
    )
