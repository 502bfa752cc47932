"""preflight on a cluster: GPUs of the nodes, and access modes of PVCs."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness.gpus import advertised
from tests.e2e.harness.rights import DEPLOY
from tests.e2e.harness.scene import Scene

pytestmark = pytest.mark.smoke

NAMESPACE = "namespace: kubeflow\n"
SOURCE: dict[str, Any] = {"source": "gs://nowhere", "recipe": "none"}
"""A bucket that preflight does not read, as nothing is sized."""


@pytest.fixture
def right(scene: Scene, tmp_path: Path) -> Iterator[None]:
    """The right of `deploy/rbac/nodes`, applied as the comment in its files says."""
    for file in (DEPLOY / "rbac" / "nodes").iterdir():
        text = file.read_text()
        if file.name == "kustomization.yaml":
            assert text.count(NAMESPACE) == 1
            text = text.replace(NAMESPACE, f"namespace: {scene.grounds.namespace}\n")
        (tmp_path / file.name).write_text(text)
    kubectl("apply", "-k", str(tmp_path), "--validate=strict")
    yield
    kubectl("delete", "-k", str(tmp_path), "--wait=false")


def kubectl(*arguments: str) -> None:
    done = subprocess.run(["kubectl", *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_missing_right_to_list_nodes_is_an_error(scene: Scene) -> None:
    run = scene.run(**SOURCE).play()
    assert list(run.steps) == ["preflight"], run.explain()
    log = run.steps["preflight"].log
    assert "Traceback" not in log, log
    message = log.splitlines()[-1]
    assert message.startswith("error: whether nodes have GPUs cannot be seen ("), message
    assert "give gpus_per_node, 0 to train on CPUs" in message


@pytest.mark.usefixtures("right")
def test_pods_request_the_gpus_of_a_node(scene: Scene) -> None:
    with advertised(scene.grounds.api, 3) as gpu:
        run = scene.run(**SOURCE, job={"gpu_resource": gpu}).play()
    plan = run.steps["preflight"]
    assert plan.succeeded, run.explain()
    assert plan.outputs["job"]["gpus_per_node"] == 3
    assert "pytorchjob of 1 pod, 3 GPUs each" in plan.log


def test_pvc_that_workers_cannot_share_is_an_error_or_a_warning(scene: Scene) -> None:
    """ReadWriteOnce works on one node; without the right to list nodes it is a warning."""
    space = scene.grounds.namespace
    for mode in ("ReadWriteOnce", "ReadWriteOncePod"):
        spec = {"accessModes": [mode], "resources": {"requests": {"storage": "1Mi"}}}
        body = {"metadata": {"name": mode.lower()}, "spec": spec}
        scene.grounds.core.create_namespaced_persistent_volume_claim(space, body)
        arguments: dict[str, Any] = SOURCE | {"gpus_per_node": 0, "nodes": 2}
        run = scene.run(**arguments, sync={"claim": mode.lower()}).play()
        log = run.steps["preflight"].log.splitlines()
        begin = "warning" if mode == "ReadWriteOnce" else "error"
        begin += f": claim {mode.lower()} is {mode}, and the step that launches"
        (message,) = (line for line in log if line.startswith(begin))
        assert 'make it ReadWriteMany, or set sync={"publish": "clone"}' in message
        assert run.steps["preflight"].succeeded == (mode == "ReadWriteOnce")
        scene.grounds.core.delete_namespaced_persistent_volume_claim(mode.lower(), space)
