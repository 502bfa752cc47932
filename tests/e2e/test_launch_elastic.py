"""Elastic PyTorchJobs that lose a worker as a drained node takes it: they go on without it."""

# ruff: noqa: F811 (fixtures that are imported)

import pytest

from kfp_ddp.training.config import TrainConfig
from tests.e2e.harness.grounds import Folder, Grounds
from tests.e2e.harness.launch_step import LaunchStep, python
from tests.e2e.test_launch_train_step import grounds, work  # noqa: F401

# Ranks that meet in gloo and keep how far they are where a later start finds it.
COUNT = """
import time
from pathlib import Path
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
world, rank = dist.get_world_size(), dist.get_rank()
place = Path("/work/count")
begin = torch.tensor(float(place.read_text()) if place.exists() else 0.0)
dist.broadcast(begin, 0)
for step in range(int(begin), 150):
    dist.all_reduce(torch.ones(1))
    if rank == 0:
        place.write_text(str(step + 1))
        if step % 10 == 0:
            print("step", step, "of", world, "ranks", flush=True)
    time.sleep(0.1)
dist.barrier()
"""


ELASTIC = {"elastic": "1:2", "nodes": 2, "nproc_per_node": 1, "retries": 0}
CLAIMS = {"claims": {"/data": "data", "/work": "work"}}


def test_a_script_resumes_when_a_worker_is_drained(grounds: Grounds) -> None:
    """The worker ends with a signal's code, the operator makes it anew, and ranks start again."""
    step = LaunchStep(grounds, {"script": COUNT, **ELASTIC, **CLAIMS}).start()
    step.saw("step 30 of 2 ranks")
    drain(grounds, step)
    assert step.wait() == "Succeeded", step.log()
    assert "step 140 of" in step.log()
    assert step.log().splitlines()[-1] == f"DONE {job_name(step)} 1"


@pytest.mark.parametrize(
    "grace", [None, pytest.param(0, marks=pytest.mark.soak)], ids=["drained", "lost"]
)
@pytest.mark.smoke
def test_training_resumes_after_the_loss_of_a_worker(
    grounds: Grounds, work: Folder, grace: int | None
) -> None:
    config = TrainConfig(
        data="/data",
        output_dir=f"/work/elastic-{grace}",
        model="cifar_resnet8",
        image_size=8,
        epochs=60,
        batch_size=16,
        workers=0,
    )
    command = ["python3", "-m", "kfp_ddp.training.node", "--", *config.to_argv()]
    fields = {"command": command, "env": {"OMP_NUM_THREADS": "1"}, "grace_seconds": 20}
    step = LaunchStep(grounds, {**fields, **ELASTIC, **CLAIMS}).start()
    step.saw("epoch 5/")
    drain(grounds, step, grace)
    assert step.wait() == "Succeeded", step.log()
    assert step.log().splitlines()[-1] == f"DONE {job_name(step)} 1"
    events = work.events(f"elastic-{grace}/metrics.jsonl")
    starts = [event for event in events if event["event"] == "start"]
    assert starts[0]["world_size"] == 2
    assert starts[-1]["resumed_from_step"] > 0
    assert events[-1]["status"] == "done"


def test_elastic_job_out_of_memory_fails(grounds: Grounds) -> None:
    """Its operator makes the pod anew without an end."""
    spec = {**python("hoard = b'x' * 2**30"), **ELASTIC, "elastic": "1:1", "nodes": 1}
    step = LaunchStep(grounds, {**spec, "memory": "64Mi", "shm_size": ""}).start()
    assert step.wait() == "Failed"
    assert "worker-0: out of memory (OOMKilled)" in step.log().splitlines()[-1], step.log()
    assert step.jobs() == []


def drain(grounds: Grounds, step: LaunchStep, grace: int | None = None) -> None:
    """Delete the second worker: with its grace period as `kubectl drain` does, or with `grace`."""
    name = next(p.metadata.name for p in step.workers() if p.metadata.name.endswith("worker-1"))
    grounds.core.delete_namespaced_pod(name, grounds.namespace, grace_period_seconds=grace)


def job_name(step: LaunchStep) -> str:
    (job,) = step.jobs()
    return str(job["metadata"]["name"])
