"""MPIJobs: slots of ranks, a failed rank, and workers that come late; and a TrainJob of MPI."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes import client

from tests.e2e.harness import workflow
from tests.e2e.harness.admission import provide_kubectl, skip_without_mpi
from tests.e2e.harness.gpus import GPU, advertise_gpus
from tests.e2e.harness.grounds import IMAGE, Grounds, claim, until, with_retries
from tests.e2e.harness.launch_step import LaunchStep
from tests.e2e.harness.namespace import namespace

RANK = 'import os, time\nrank = int(os.environ["OMPI_COMM_WORLD_RANK"])\n'
FOREVER = RANK + 'print("rank", rank, "runs", flush=True)\ntime.sleep(600)\n'


USER = 65532
"""The user of the test images that has a home and a shell."""
PORT = 2222
OPTIONS = f"-f /dev/null -p {PORT} -h /tmp/host -o StrictModes=no -o PidFile=none -o UsePAM=no"
SSHD = f"ssh-keygen -q -t ed25519 -N '' -f /tmp/host && exec /usr/sbin/sshd -De {OPTIONS}"
SSH = f"ssh -p {PORT} -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
RUNTIMES = ("trainer.kubeflow.org", "v1alpha1")


def mpi_runtime() -> dict[str, Any]:
    """A runtime as Trainer's own deepspeed-distributed, with the SSH of the test image."""

    def replicated(job: dict[str, Any], **container: Any) -> dict[str, Any]:
        node = {"name": "node", "image": IMAGE, "imagePullPolicy": "IfNotPresent", **container}
        template = {"spec": {"template": {"spec": {"containers": [node]}}}}
        return {**job, "template": {**template, **job.get("template", {})}}

    ready = {"tcpSocket": {"port": PORT}, "periodSeconds": 1}
    nodes = replicated({"name": "node"}, command=["sh", "-c", SSHD], readinessProbe=ready)
    trainer = {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}
    launcher = {"name": "launcher", "dependsOn": [{"name": "node", "status": "Ready"}]}
    jobs = [nodes, replicated({**launcher, "template": {"metadata": trainer}})]
    mpi = {
        "numProcPerNode": 1,
        "mpiImplementation": "OpenMPI",
        "sshAuthMountPath": "/home/app/.ssh",
        "runLauncherAsNode": True,
    }
    template = {
        "network": {"publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": ["launcher"]},
        "replicatedJobs": jobs,
    }
    return {
        "apiVersion": "/".join(RUNTIMES),
        "kind": "TrainingRuntime",
        "metadata": {"name": "mine"},
        "spec": {"mlPolicy": {"numNodes": 1, "mpi": mpi}, "template": {"spec": template}},
    }


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


def test_a_trainjob_on_a_runtime_of_mpi_runs_ranks_on_all_nodes(mpi_grounds: Grounds) -> None:
    if shutil.which("sshd", path="/usr/sbin") is None:
        pytest.skip("no sshd under /usr; openssh-server is needed")
    space = mpi_grounds.namespace
    mpi_grounds.custom.create_namespaced_custom_object(
        *RUNTIMES, space, "trainingruntimes", mpi_runtime()
    )
    claim(mpi_grounds, "data")
    line = RANK + (
        "host = os.uname().nodename.rsplit('-', 3)[1]\n"
        "open(f'/data/{host}', 'w').write(os.environ['A'])\n"
        "print('rank', rank, 'of', os.environ['OMPI_COMM_WORLD_SIZE'], host, flush=True)\n"
    )
    fields = {
        "kind": "trainjob",
        "image": IMAGE,
        "runtime": "mine",
        "nodes": 2,
        "run_as_user": USER,
        "fs_group": USER,
        "env": {"A": "b", "OMPI_MCA_plm_rsh_agent": SSH},
        "claims": {"/data": "data"},
        "retries": 0,
    }
    step = LaunchStep(mpi_grounds, {**fields, "script": line}).start()
    assert step.wait() == "Succeeded", step.log()
    texts = {text.partition("] ")[2] for text in step.log().splitlines() if "[launcher-0]" in text}
    assert {"rank 0 of 2 launcher", "rank 1 of 2 node"} <= texts, step.log()

    fails = RANK + "if rank == 1: raise ValueError('no such layer')\ntime.sleep(600)\n"
    step = LaunchStep(mpi_grounds, {**fields, "script": fails}).start()
    assert step.wait() == "Failed"
    assert "launcher-0: rank 1: ValueError: no such layer" in step.log(), step.log()
    until(lambda: _running(step) == [], "the nodes' end", 60)


def _phases(step: LaunchStep) -> dict[str, str]:
    """The phase of each pod of the job."""
    return {pod.metadata.name: pod.status.phase for pod in with_retries(step.workers)}


def _running(step: LaunchStep) -> list[str]:
    return [name for name, phase in _phases(step).items() if phase in ("Pending", "Running")]
