"""Faults that a user makes or meets, each told in one line of the step's own log."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from tests.e2e.harness import grounds
from tests.e2e.harness.namespace import DATA, WORK
from tests.e2e.harness.play import Run
from tests.e2e.harness.scene import Scene, make_scene
from tests.e2e.harness.training import LOOP, TRAINING, WORKERS
from tests.e2e.harness.trainings import compiled, train_only

UNBOUND = "unbound"
# What is asked of the job, and what the last line of the step's log says of it.
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "image": ({"image": "registry.invalid/none:1"}, "cannot pull registry.invalid/none:1"),
    "requests": ({"cpu": "500"}, "no node has enough cpu free"),
    "unbound claim": (
        {"claims": {"/extra": UNBOUND}},
        f"claim {UNBOUND} is not bound (StorageClass nowhere)",
    ),
}


@pytest.fixture(scope="module")
def bare(
    cluster: client.ApiClient, bucket_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scene]:
    """A namespace whose steps have KFP's stock rights alone, and claims of a mebibyte."""
    with make_scene(
        cluster,
        tmp_path_factory.mktemp("bare"),
        {"STORAGE_EMULATOR_HOST": bucket_url},
        storage_class="small",
        size="1Mi",
        ours=False,
    ) as staging:
        yield staging


def test_what_cannot_start_is_explained(bare: Scene, tmp_path: Path) -> None:
    """All at once: each waits for its pods as long as it is told to."""
    grounds.claim(bare.grounds, UNBOUND, "nowhere")
    document = compiled(train_only, tmp_path)
    runs = {
        name: bare.run(document, **_arguments(pending_minutes=0.2, **requests)).start()
        for name, (requests, _) in FAULTS.items()
    }
    for name, run in runs.items():
        run.wait()
        assert FAULTS[name][1] in _error(run), f"{name}: {run.explain()}"
        assert run.steps["teardown"].succeeded, run.explain()


def test_a_volume_that_cannot_be_mounted_is_explained(scene: Scene, tmp_path: Path) -> None:
    """Only events tell it, which the rights of `deploy/rbac` let a step read."""
    absent: dict[str, Any] = {
        "volumes": [{"name": "key", "secret": {"secretName": "absent"}}],
        "volume_mounts": [{"name": "key", "mountPath": "/key"}],
    }
    requests = _arguments(pending_minutes=0.3, **absent)
    run = scene.run(compiled(train_only, tmp_path), **requests).play()

    assert 'secret "absent" not found; check the claims, secrets and maps' in _error(run)


@pytest.mark.parametrize("claim", [{"sync": {"claim": "nothing"}}, {"work_claim": "nothing"}])
def test_wrong_parameters_are_refused(scene: Scene, claim: dict[str, Any]) -> None:
    """Nothing waits for a claim that is missing, teardown neither: its pod could not start."""
    run = scene.run(**TRAINING | {"backend": "pytorchjob"} | claim).play()

    assert run.succeeded is False
    assert list(run.steps) == ["preflight"]
    assert "claim nothing does not exist" in _error(run, "preflight")


def test_exceeded_quota_is_named(bare: Scene, tmp_path: Path) -> None:
    quota = {"hard": {"count/pytorchjobs.kubeflow.org": "0"}}
    core, space = bare.grounds.core, bare.grounds.namespace
    core.create_namespaced_resource_quota(space, {"metadata": {"name": "none"}, "spec": quota})
    _enforced(bare)
    try:
        run = bare.run(compiled(train_only, tmp_path), **_arguments()).play()
    finally:
        core.delete_namespaced_resource_quota("none", space)

    assert "quota" in _error(run), run.explain()
    assert "count/pytorchjobs.kubeflow.org=1" in _error(run), run.explain()


def test_a_full_pvc_fails_before_the_download(bare: Scene) -> None:
    run = bare.run(**TRAINING, backend="local").play()

    assert run.succeeded is False
    assert list(run.steps) == ["preflight", "data-sync", "teardown"]
    assert "free" in _error(run, "data-sync"), run.explain()
    assert _versions(bare) == []


def _versions(scene: Scene) -> list[str]:
    if "versions/" not in scene.data.names():
        return []
    return [name for name in scene.data.names("versions") if not name.startswith(".")]


def _arguments(backend: str = "pytorchjob", **job: Any) -> dict[str, Any]:
    claims = {"data_claim": DATA, "work_claim": WORK, "dataset_path": "/data/versions/none"}
    return {**claims, "training": LOOP, "backend": backend, "job": {**WORKERS, **job}}


def _error(run: Run, task: str = "train") -> str:
    """The step's last line; a failure is no traceback."""
    assert run.succeeded is False, run.explain()
    log = run.steps[task].log
    assert "Traceback" not in log, log
    last = log.splitlines()[-1]
    assert last.startswith("error: "), log
    return last


def _enforced(scene: Scene) -> None:
    def counted() -> bool:
        result = scene.grounds.core.read_namespaced_resource_quota("none", scene.grounds.namespace)
        return bool(result.status.hard)

    grounds.until(counted, "the quota")
