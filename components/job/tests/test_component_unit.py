"""What `job` makes of its inputs, without a cluster."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kfp import compiler, dsl

from kfp_ddp.components.job import job
from kfp_ddp.components.job.example_pipelines import example
from kfp_ddp.jobs import engine
from kfp_ddp.jobs.identity import Ids, identify, ids_of_step
from kfp_ddp.jobs.jobs import Jobs
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.k8s.api import Api, Object

GIVEN: dict[str, Any] = {"run_id": "run-1", "task_name": "job", "task_id": "7"}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Object]:
    """The manifests of the jobs, which end at once."""
    manifests: list[Object] = []

    def launch(spec: LaunchSpec, run_id: str, name: str, task_id: str, api: Api, _: Any) -> Any:
        jobs = Jobs(api, spec, identify(run_id, name, task_id, spec), None)
        manifests.append(jobs.manifest(0))
        return SimpleNamespace(job=manifests[-1], pods=())

    monkeypatch.setattr(engine, "launch", launch)
    monkeypatch.setattr(Api, "connect", lambda: Api(None, "space"))
    return manifests


def run(folder: Path, **inputs: Any) -> str:
    """Return the name of the job of a step that runs in this process."""
    record = SimpleNamespace(path=str(folder / "job.json"), metadata={})
    return str(job.python_func(job_object=record, task_config=dsl.TaskConfig(), **inputs))


def test_the_job_is_that_of_the_inputs(made: list[Object], tmp_path: Path) -> None:
    """Image, command, nodes, GPUs and settings are in the manifest."""
    inputs = {**GIVEN, "image": "a:1", "command": ["python3", "train.py"], "nodes": 3}
    assert run(tmp_path, **inputs, gpus_per_node=2, settings={"shm_size": "1Gi"}).startswith("job-")
    (manifest,) = made
    assert manifest["kind"] == "PyTorchJob"
    assert manifest["metadata"]["labels"]["kfp-ddp/run-id"] == "run-1"
    replicas = manifest["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert replicas["replicas"] == 3
    pod = replicas["template"]["spec"]
    (worker,) = pod["containers"]
    assert (worker["image"], worker["command"]) == ("a:1", inputs["command"])
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert {"medium": "Memory", "sizeLimit": "1Gi"} in (one["emptyDir"] for one in pod["volumes"])


def test_a_job_without_ids_outside_of_kfp_is_one_of_its_own(
    made: list[Object],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """No other run can have the same."""
    monkeypatch.delenv("KFP_POD_NAME", raising=False)
    inputs = {"image": "a:1", "command": ["x"]}
    assert run(tmp_path, **inputs) != run(tmp_path, **inputs)
    assert {one["metadata"]["labels"]["kfp-ddp/task"] for one in made} == {"job"}


def test_an_invalid_setting_ends_the_step_with_one_line(made: list[Object], tmp_path: Path) -> None:
    """It ends before a job is created."""
    with pytest.raises(SystemExit, match=r"^error: .*shm_sise"):
        run(tmp_path, **GIVEN, image="a:1", command=["x"], settings={"shm_sise": "1Gi"})
    assert made == []


def test_the_example_compiles(tmp_path: Path) -> None:
    """It needs no id."""
    compiler.Compiler().compile(example, str(tmp_path / "example.yaml"))


def test_ids_that_are_given_are_not_looked_up() -> None:
    """No cluster is asked."""
    assert Ids(**GIVEN) == ids_of_step(**GIVEN)
