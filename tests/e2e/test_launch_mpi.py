"""MPIJobs: slots of ranks, a failed rank, and workers that come late."""

from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes import client

from tests.e2e.harness import workflow
from tests.e2e.harness.admission import provide_kubectl, skip_without_mpi
from tests.e2e.harness.gpus import GPU, advertise_gpus
from tests.e2e.harness.grounds import IMAGE, Grounds, until, with_retries
from tests.e2e.harness.launch_step import LaunchStep
from tests.e2e.harness.namespace import namespace

RANK = 'import os, time\nrank = int(os.environ["OMPI_COMM_WORLD_RANK"])\n'
FOREVER = RANK + 'print("rank", rank, "runs", flush=True)\ntime.sleep(600)\n'


@pytest.fixture(scope="module")
def mpi_grounds(cluster: client.ApiClient) -> Iterator[Grounds]:
    skip_without_mpi()
    workflow.define(cluster)
    with namespace(cluster) as space, provide_kubectl(space):
        yield space


def mpijob(script: str, **more: Any) -> dict[str, Any]:
    fields = {"nodes": 2, "grace_seconds": 90, "retries": 0}
    return {"kind": "mpijob", "image": IMAGE, "script": script, **fields, **more}


def test_each_worker_gets_its_slots_of_ranks(mpi_grounds: Grounds) -> None:
    line = RANK + 'print("rank", rank, "of", os.environ["OMPI_COMM_WORLD_SIZE"], flush=True)\n'
    step = LaunchStep(mpi_grounds, mpijob(line, nproc_per_node=2)).start()
    assert step.wait() == "Succeeded", step.log()
    for rank in range(4):
        assert f"[launcher-0] rank {rank} of 4" in step.log(), step.log()
    (job,) = step.jobs("mpijob")
    name = job["metadata"]["name"]
    config = mpi_grounds.core.read_namespaced_config_map(f"{name}-config", mpi_grounds.namespace)
    assert config.data["hostfile"] == f"{name}-worker-0 slots=2\n{name}-worker-1 slots=2\n"


def test_failed_rank_is_named_and_all_workers_end(mpi_grounds: Grounds) -> None:
    """Workers do nothing but wait, so they hold no GPU for the 90 s that ranks may take to save."""
    script = FOREVER.replace(
        "time.sleep(600)",
        'time.sleep(2)\nif rank == 1: raise ValueError("no such layer")\ntime.sleep(600)',
    )
    step = LaunchStep(mpi_grounds, mpijob(script)).start()
    assert step.wait() == "Failed"
    last = step.log().splitlines()[-1]
    assert "launcher-0: rank 1: ValueError: no such layer" in last, step.log()
    until(lambda: _running(step) == [], "the workers' end", 60)


def test_ranks_wait_for_late_workers(mpi_grounds: Grounds) -> None:
    """The operator starts the launcher at once, and mpirun does not wait."""
    spec = mpijob("print('both here', flush=True)\n", gpus_per_node=1, gpu_resource=GPU)
    step = LaunchStep(mpi_grounds, spec).start()
    step.saw(f"no node has enough {GPU} free")
    until(lambda: "Running" in _phases(step).values(), "the launcher", 60)
    assert set(_phases(step).values()) == {"Running", "Pending"}
    with advertise_gpus(mpi_grounds.api, 2):
        assert step.wait() == "Succeeded", step.log()
    assert step.log().count("[launcher-0] both here") == 2


def _phases(step: LaunchStep) -> dict[str, str]:
    """The phase of each pod of the job."""
    return {pod.metadata.name: pod.status.phase for pod in with_retries(step.workers)}


def _running(step: LaunchStep) -> list[str]:
    return [name for name, phase in _phases(step).items() if phase in ("Pending", "Running")]
