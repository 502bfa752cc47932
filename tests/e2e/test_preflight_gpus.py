"""preflight on a cluster: the GPUs of its nodes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness.gpus import advertise_gpus
from tests.e2e.harness.programs import kubectl
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


@pytest.mark.usefixtures("right")
def test_pods_request_the_gpus_of_a_node(scene: Scene) -> None:
    with advertise_gpus(scene.grounds.api, 3) as gpu:
        run = scene.run(**SOURCE, job={"gpu_resource": gpu}).play()
    plan = run.steps["preflight"]
    assert plan.succeeded, run.explain()
    assert plan.outputs["job"]["gpus_per_node"] == 3
    assert "pytorchjob of 1 pod, 3 GPUs each" in plan.log
