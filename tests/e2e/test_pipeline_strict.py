"""The pipeline under a ResourceQuota and PodSecurity `restricted`."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from kubernetes import client

from kfp_ddp.checks.form import EVALUATE_ASKS, SYNC_ASKS
from kfp_ddp.pipelines.compiled import built_in, write
from tests.e2e.harness.grounds import IMAGE, Grounds, until
from tests.e2e.harness.play import Run
from tests.e2e.harness.programs import kubectl
from tests.e2e.harness.rights import DEPLOY
from tests.e2e.harness.scene import COMPILED, Scene, make_scene
from tests.e2e.harness.training import TRAINING, WORKERS

pytestmark = pytest.mark.smoke

QUOTA = {
    "requests.cpu": "1800m",
    "limits.cpu": "16",
    "requests.memory": "8Gi",
    "limits.memory": "24Gi",
}
STEPS = {
    "sync_cpu": "300m",
    "sync_memory": "512Mi",
    "evaluate_cpu": "500m",
    "evaluate_memory": "2Gi",
}


@dataclass(frozen=True)
class Seen:
    """A finished run, and its pods."""

    scene: Scene
    run: Run
    evicted: dict[str, int]
    """HTTP status of an eviction, by step."""
    resources: dict[str, Any]
    """Resources of the main container, by step."""


@pytest.fixture(scope="module")
def seen(
    cluster: client.ApiClient, bucket_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Seen]:
    folder = tmp_path_factory.mktemp("strict")
    environment = {"STORAGE_EMULATOR_HOST": bucket_url}
    with make_scene(cluster, folder, environment, strict=QUOTA) as scene:
        kubectl("apply", "-n", scene.grounds.namespace, "-k", str(DEPLOY / "eviction"))
        arguments = TRAINING | {"nodes": 2, "job": {**WORKERS, "nproc_per_node": 1, **STEPS}}
        document = folder / "compiled" / COMPILED.name
        assert document in write(built_in(), document.parent, restricted=True)
        run = scene.run(document, **arguments, backend="pytorchjob").start()
        evicted = {name: _evict(scene.grounds, run, name) for name in ("data-sync", "train")}
        run.wait()
        pods = {name: _pod(scene.grounds, step.pod) for name, step in run.steps.items()}
        resources = {n: pod.spec.containers[0].resources for n, pod in pods.items() if pod}
        yield Seen(scene, run, evicted, resources)


def test_run_succeeds(seen: Seen) -> None:
    assert seen.run.succeeded, seen.run.explain()
    assert "publish" in seen.run.steps
    message = "pytorchjob of 2 pods, no GPU each, at most 4 cpu and 4Gi memory"
    assert message in seen.run.steps["preflight"].log, "default resources of workers"


def test_quota_and_level_are_enforced(seen: Seen) -> None:
    refused = {
        "failed quota": {"name": "a", "image": IMAGE, "securityContext": _non_root()},
        "violates PodSecurity": {"name": "a", "image": IMAGE},
    }
    for why, container in refused.items():
        body = {"metadata": {"name": "b"}, "spec": {"containers": [container]}}
        with pytest.raises(client.ApiException) as raised:
            seen.scene.grounds.core.create_namespaced_pod(
                seen.scene.grounds.namespace, body, dry_run="All"
            )
        assert why in raised.value.body


def test_steps_have_the_resources_of_the_settings(seen: Seen) -> None:
    launcher, evaluate = {"cpu": "500m", "memory": "1Gi"}, {"cpu": "500m", "memory": "2Gi"}
    expected = {
        "data-sync": ({"cpu": "300m", "memory": "512Mi"}, SYNC_ASKS),
        "train": (launcher, launcher),
        "evaluate": (evaluate, EVALUATE_ASKS),
        "export": (evaluate, EVALUATE_ASKS),
    }
    for name, (limits, asks) in expected.items():
        result = seen.resources[name]
        assert (result.limits, result.requests) == (limits, asks), name


def test_long_step_is_not_evicted(seen: Seen) -> None:
    """A drain gets Too Many Requests, and waits."""
    assert seen.evicted == {"data-sync": 429, "train": 429}
    assert {len(step.attempts) for step in seen.run.steps.values()} == {1}


def _evict(grounds: Grounds, run: Run, step: str) -> int:
    """Evict the running pod of a step; return the HTTP status."""

    def running() -> bool:
        assert run.succeeded is None, run.explain()
        pod = _pod(grounds, run.steps[step].pod) if step in run.steps else None
        return bool(pod and pod.status.phase == "Running")

    until(running, f"{step} runs", 240)
    name = run.steps[step].pod
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}

    def answer() -> int:
        try:
            grounds.core.create_namespaced_pod_eviction(name, grounds.namespace, body)
        except client.ApiException as error:
            return int(error.status)
        return 201

    return answer()


def _pod(grounds: Grounds, name: str) -> Any:
    try:
        return grounds.core.read_namespaced_pod(name, grounds.namespace)
    except client.ApiException as error:
        if error.status == 404:
            return None
        raise


def _non_root() -> dict[str, Any]:
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
