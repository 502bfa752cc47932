"""What preflight sees of a cluster: the GPUs of its nodes where nobody said, and claims' modes."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness.gpus import advertised, no_gpus
from tests.e2e.harness.grounds import Grounds
from tests.e2e.harness.play import Run
from tests.e2e.harness.rights import DEPLOY
from tests.e2e.harness.scene import Scene

pytestmark = pytest.mark.smoke

NAMESPACE = "namespace: kubeflow\n"


def asked(scene: Scene, resource: str = "nvidia.com/gpu") -> Run:
    """A run with gpus_per_node left open, which ends at its bucket at the latest: there is none."""
    return scene.run(source="gs://nowhere", job={"gpu_resource": resource}).play()


def error(run: Run) -> str:
    """The one line that preflight ended with, before anything else began."""
    assert list(run.steps) == ["preflight"], run.explain()
    log = run.steps["preflight"].log
    assert "Traceback" not in log, log
    return log.splitlines()[-1]


@pytest.fixture
def right(scene: Scene, tmp_path: Path) -> Iterator[None]:
    """The right of `deploy/rbac/nodes`, applied as its first lines say."""
    with applied(scene.grounds, tmp_path):
        yield


@contextmanager
def applied(grounds: Grounds, folder: Path) -> Iterator[None]:
    for file in (DEPLOY / "rbac" / "nodes").iterdir():
        text = file.read_text()
        if file.name == "kustomization.yaml":
            assert text.count(NAMESPACE) == 1
            text = text.replace(NAMESPACE, f"namespace: {grounds.namespace}\n")
        (folder / file.name).write_text(text)
    kubectl("apply", "-k", str(folder), "--validate=strict")
    try:
        yield
    finally:
        kubectl("delete", "-k", str(folder), "--wait=false")


def kubectl(*arguments: str) -> None:
    done = subprocess.run(["kubectl", *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_without_the_right_to_see_nodes_it_names_the_ways_out(scene: Scene) -> None:
    said = error(asked(scene))
    assert said.startswith("error: whether nodes have GPUs cannot be seen ("), said
    assert "give gpus_per_node, 0 to train on CPUs" in said
    assert said.endswith("apply deploy/rbac/nodes"), said


@pytest.mark.usefixtures("right")
def test_nothing_trains_on_cpus_by_silence(scene: Scene) -> None:
    with no_gpus():
        said = error(asked(scene))
    assert said.startswith("error: no node has nvidia.com/gpu: give gpus_per_node, 0 to"), said


@pytest.mark.usefixtures("right")
def test_as_many_as_a_node_has_are_asked_for(scene: Scene) -> None:
    with advertised(scene.grounds.api, 3) as gpu:
        run = asked(scene, gpu)
    plan = run.steps["preflight"]
    assert plan.succeeded, run.explain()
    assert plan.outputs["job"]["gpus_per_node"] == 3
    assert "pytorchjob of 1 pod(s), 3 GPU(s) each" in plan.log


@pytest.mark.usefixtures("right")
def test_gpus_by_another_name_are_not_left_idle_by_silence(scene: Scene) -> None:
    with advertised(scene.grounds.api, 3) as gpu:
        said = error(asked(scene))
    assert said.startswith(f"error: no node has nvidia.com/gpu, but there is {gpu}: set job="), said


@pytest.mark.usefixtures("right")
def test_gpus_that_are_left_idle_on_purpose_are_named(scene: Scene) -> None:
    with advertised(scene.grounds.api, 3) as gpu:
        run = scene.run(source="gs://nowhere", gpus_per_node=0).play()
    said = "warning: no GPU is requested (gpus_per_node=0): this trains on CPUs"
    assert f"{said}, though nodes have 3 {gpu}" in run.steps["preflight"].log.splitlines()


def test_a_claim_that_workers_cannot_share_ends_the_run_or_is_told(scene: Scene) -> None:
    """ReadWriteOnce works on one node; without the right to see how many there are it is told."""
    space = scene.grounds.namespace
    for mode in ("ReadWriteOnce", "ReadWriteOncePod"):
        spec = {"accessModes": [mode], "resources": {"requests": {"storage": "1Mi"}}}
        body = {"metadata": {"name": mode.lower()}, "spec": spec}
        scene.grounds.core.create_namespaced_persistent_volume_claim(space, body)
        given: dict[str, Any] = {"source": "gs://nowhere", "gpus_per_node": 0, "nodes": 2}
        run = scene.run(**given, sync={"claim": mode.lower()}).play()
        log = run.steps["preflight"].log.splitlines()
        begin = "warning" if mode == "ReadWriteOnce" else "error"
        begin += f": claim {mode.lower()} is {mode}, and the step that launches"
        (said,) = (line for line in log if line.startswith(begin))
        assert 'make it ReadWriteMany, or set sync={"publish": "clone"}' in said
        assert run.steps["preflight"].succeeded == (mode == "ReadWriteOnce")
        scene.grounds.core.delete_namespaced_persistent_volume_claim(mode.lower(), space)
