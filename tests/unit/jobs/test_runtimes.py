"""The runtime of a TrainJob: whose it is, what it asks for, and what starts its ranks."""

from typing import Any

import pytest

from kfp_ddp.core.errors import InputError
from kfp_ddp.jobs.kinds import KINDS
from kfp_ddp.jobs.kinds.base import Runtime
from kfp_ddp.jobs.launch_spec import LaunchSpec
from tests.cluster import FakeApi

GROUP = "/apis/trainer.kubeflow.org/v1alpha1"
SPACE = f"{GROUP}/namespaces/space/trainingruntimes/mine"
WHOLE = f"{GROUP}/clustertrainingruntimes/mine"
SPEC = LaunchSpec.create(image="a:1", command=["true"], kind="trainjob", runtime="mine")


def runtime(resources: dict[str, Any]) -> dict[str, Any]:
    """A runtime whose node asks for that, and whose other container for more."""
    other = {"name": "other", "resources": {"limits": {"cpu": "1"}}}
    pod = {
        "spec": {"containers": [other, {"name": "node", "image": "a:1", "resources": resources}]}
    }
    job = {"name": "node", "template": {"spec": {"template": pod}}}
    template = {"spec": {"replicatedJobs": [job]}}
    return {"spec": {"mlPolicy": {"torch": {}}, "template": template}}


BARE, FULL = runtime({}), runtime({"requests": {"cpu": "1"}})


@pytest.mark.parametrize(
    ("space", "whole", "kind", "has_resources"),
    [
        *((BARE, FULL, "TrainingRuntime", False), (FULL, BARE, "TrainingRuntime", True)),
        (404, BARE, "ClusterTrainingRuntime", False),
        (404, FULL, "ClusterTrainingRuntime", True),
        (403, BARE, "ClusterTrainingRuntime", False),
        *((404, 403, "ClusterTrainingRuntime", True), (403, 403, "ClusterTrainingRuntime", True)),
        (403, 404, "TrainingRuntime", True),
    ],
)
def test_own_runtimes_come_first(space: Any, whole: Any, kind: str, has_resources: bool) -> None:
    """Of one that may not be looked at, nobody knows what its nodes ask for: it is not changed."""
    api = FakeApi({SPACE: space, WHOLE: whole})
    assert KINDS["trainjob"].find_runtime(api, SPEC) == Runtime(kind, has_resources)


def test_trainers_own_runtime_has_no_resources() -> None:
    paths = [path.replace("mine", "torch-distributed") for path in (SPACE, WHOLE)]
    spec = SPEC.model_copy(update={"runtime": "torch-distributed"})
    runtime = KINDS["trainjob"].find_runtime(FakeApi(dict.fromkeys(paths, 403)), spec)
    assert runtime == Runtime("ClusterTrainingRuntime", has_resources=False)


@pytest.mark.parametrize(
    ("policy", "starts"),
    [
        ({"torch": {"numProcPerNode": "auto"}}, ["python3", "-m", "torch.distributed.run"]),
        ({"mpi": {}}, ["mpirun", "-x", "PATH", "-x", "PYTHONUNBUFFERED"]),
        *(({name: {}}, ["python3", "/etc/kfp-ddp/script.py"]) for name in ("jax", "xgboost")),
        ({"numNodes": 1}, ["python3", "/etc/kfp-ddp/script.py"]),
        (None, ["python3", "/etc/kfp-ddp/script.py"]),
    ],
)
def test_a_runtime_says_what_starts_the_ranks(policy: Any, starts: list[str]) -> None:
    job = of_runtime("a:1", {**runtime({})["spec"], "mlPolicy": policy})
    command = job["trainer"]["command"]
    assert command[: len(starts)] == starts
    torch = any(item["name"] == "PET_RDZV_CONF" for item in job["trainer"]["env"])
    assert torch == ("torch.distributed.run" in command)
    assert patched(job) == ["node"]


def test_an_mpi_runtime_is_patched_where_mpirun_and_its_ranks_run() -> None:
    """Trainer gives the command to the launcher, and the image to it alone."""
    parts = {
        name: {"name": name, "template": {"spec": {"template": {"spec": {"containers": [node]}}}}}
        for name, node in (
            ("node", {"name": "node", "image": "a:1"}),
            ("launcher", {"name": "node", "image": "other"}),
            ("dataset-initializer", {"name": "dataset-initializer", "image": "b:1"}),
        )
    }
    template = {"spec": {"replicatedJobs": list(parts.values())}}
    spec = {"mlPolicy": {"mpi": {"numProcPerNode": 1}}, "template": template}
    job = of_runtime("a:1", spec)
    assert patched(job) == ["node", "launcher"]
    sent = {item["name"] for item in job["trainer"]["env"]}
    words = job["trainer"]["command"]
    forwarded = {words[i + 1] for i, word in enumerate(words) if word == "-x"}
    assert forwarded == sent - {"KFP_DDP_NODE"} | {"PATH"}
    with pytest.raises(InputError, match="image a:1, which a TrainJob cannot replace"):
        of_runtime("own:1", spec)


def of_runtime(image: str, runtime: Any) -> Any:
    """The TrainJob of a script on a runtime of a namespace."""
    spec = LaunchSpec.create(
        image=image, script="print()", kind="trainjob", runtime="mine", claims={"/data": "data"}
    )
    kind = KINDS["trainjob"]
    existing = kind.find_runtime(FakeApi({SPACE: {"spec": runtime}}), spec)
    return kind.manifest(spec, {"name": "job", "labels": {}}, "map", existing)["spec"]


def patched(job: Any) -> list[str]:
    """The parts of the runtime in which a TrainJob mounts script and claim."""
    (patch,) = job["runtimePatches"]
    parts = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    names = []
    for item in parts:
        (container,) = item["template"]["spec"]["template"]["spec"]["containers"]
        assert {mount["mountPath"] for mount in container["volumeMounts"]} > {"/data"}
        names.append(item["name"])
    return names


def test_a_missing_runtime_is_an_input_error() -> None:
    with pytest.raises(InputError, match="runtime 'mine' does not exist; use one of `kubectl get"):
        KINDS["trainjob"].find_runtime(FakeApi({}), SPEC)
