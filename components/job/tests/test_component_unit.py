"""What `job` makes of its inputs, without a cluster.

The imports are in functions, as kubeflow/pipelines-components wants them.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kfp import compiler, dsl

GIVEN: dict[str, Any] = {"run_id": "run-1", "task_name": "job", "task_id": "7"}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The manifests of the jobs, which end at once."""
    from kfp_ddp.jobs import engine
    from kfp_ddp.jobs.identity import identify
    from kfp_ddp.jobs.jobs import Jobs
    from kfp_ddp.k8s.api import Api

    manifests: list[dict[str, Any]] = []

    def launch(spec: Any, run_id: str, name: str, task_id: str, api: Api, _: Any) -> Any:
        jobs = Jobs(api, spec, identify(run_id, name, task_id, spec), None)
        manifests.append(jobs.manifest(0))
        return SimpleNamespace(job=manifests[-1], pods=())

    monkeypatch.setattr(engine, "launch", launch)
    monkeypatch.setattr(Api, "connect", lambda **_: Api(None, "space"))
    return manifests


def run(folder: Path, **inputs: Any) -> str:
    """Return the name of the job of a step that runs in this process."""
    from kfp_ddp.components.job import job

    record = SimpleNamespace(path=str(folder / "job.json"), metadata={})
    return str(job.python_func(job_object=record, task_config=dsl.TaskConfig(), **inputs))


def test_the_job_is_that_of_the_inputs(made: list[dict[str, Any]], tmp_path: Path) -> None:
    """Image, command, nodes, GPUs and settings are in the manifest."""
    inputs = {**GIVEN, "image": "a:1", "command": ["python3", "train.py"], "nodes": 3}
    name = run(tmp_path, **inputs, gpus_per_node=2, settings={"shm_size": "1Gi"})
    (manifest,) = made
    assert manifest["kind"] == "PyTorchJob"
    assert manifest["metadata"]["name"] == name
    assert manifest["metadata"]["labels"]["kfp-ddp/run-id"] == "run-1"
    replicas = manifest["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert replicas["replicas"] == 3
    pod = replicas["template"]["spec"]
    (worker,) = pod["containers"]
    assert (worker["image"], worker["command"]) == ("a:1", inputs["command"])
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == "2"
    (volume,) = pod["volumes"]
    assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Gi"}


def test_a_job_without_ids_outside_of_kfp_is_one_of_its_own(
    made: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """No other run can have the same."""
    monkeypatch.delenv("KFP_POD_NAME", raising=False)
    inputs: dict[str, Any] = {"image": "a:1", "command": ["x"]}
    assert run(tmp_path, **inputs) != run(tmp_path, **inputs)
    first, second = (one["metadata"]["labels"] for one in made)
    assert first["kfp-ddp/task"] == second["kfp-ddp/task"] == "job"


def test_an_invalid_setting_ends_the_step_with_one_line(
    made: list[dict[str, Any]],
    tmp_path: Path,
) -> None:
    """It ends before a job is created."""
    with pytest.raises(SystemExit, match=r"^error: .*shm_sise"):
        run(tmp_path, **GIVEN, image="a:1", command=["x"], settings={"shm_sise": "1Gi"})
    assert made == []


def test_the_example_compiles(tmp_path: Path) -> None:
    """It needs no id."""
    from kfp_ddp.components.job.example_pipelines import example

    compiler.Compiler().compile(example, str(tmp_path / "example.yaml"))
