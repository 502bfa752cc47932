"""The train step on a cluster: real ranks of a real job, followed, retried, and its outputs."""

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import pytest
from kubernetes import client

from tests.e2e.harness import grounds as lands
from tests.e2e.harness import step_pod, workflow
from tests.e2e.harness.admission import gate_pods
from tests.e2e.harness.grounds import Folder, Grounds, claim, until
from tests.e2e.harness.launch_step import Step
from tests.e2e.harness.namespace import namespace
from tests.e2e.harness.running import run_in

DATA = """
from pathlib import Path
from PIL import Image
for split, count in (("train", 24), ("val", 8)):
    for name, shade in (("dark", 30), ("light", 220)):
        folder = Path("/data") / split / name
        folder.mkdir(parents=True, exist_ok=True)
        for index in range(count):
            Image.new("RGB", (8, 8), (shade + index % 20,) * 3).save(folder / f"{index}.png")
"""

TRAINING: dict[str, Any] = {
    "model": "cifar_resnet8",
    "image_size": 8,
    "epochs": 2,
    "batch_size": 16,
    "warmup_epochs": 0.0,
    "workers": 0,
    "log_steps": 1,
}
JOB: dict[str, Any] = {
    "nproc_per_node": 1,
    "cpu_request": "50m",
    "run_as_user": lands.UID,
    "shm_size": "64Mi",
    "grace_seconds": 20,
    "env": {"OMP_NUM_THREADS": "1"},
}
CONTAINER = {"pytorchjob": "pytorch", "trainjob": "node"}

WRITE = """
import errno
for path in ("/data/new", "/data/train/dark/0.png", "/work/new"):
    try:
        open(path, "ab").close()
        print(path, "written")
    except OSError as error:
        print(path, errno.errorcode[error.errno])
"""

TRAIN = """
import json, sys
from types import SimpleNamespace
from kfp_ddp.components.train.component import train

def artifact(name):
    found = SimpleNamespace(path=f"/work/out/{name}", metadata={})
    found.log_metric = lambda key, value: found.metadata.__setitem__(key, value)
    return found

given = json.loads(sys.argv[1])
names = ("trained_model", "train_metrics", "loss_curve", "training_job")
artifacts = {name: artifact(name) for name in names}
train.python_func(**artifacts, task_config=None, **given)
"""


@pytest.fixture(scope="module")
def grounds(cluster: client.ApiClient) -> Iterator[Grounds]:
    workflow.define(cluster)
    with namespace(cluster) as space:
        claim(space, "data")
        claim(space, "work")
        step_pod.run(space, "fill", ["python3", "-c", DATA], data="data")
        yield space


@pytest.fixture(scope="module")
def work(grounds: Grounds) -> Iterator[Folder]:
    with lands.serve_files(grounds, "work") as folder:
        yield folder


class TrainStep(Step):
    """The component itself in its pod, with both claims mounted as mount_pvc does."""

    def __init__(
        self,
        grounds: Grounds,
        work_claim: str = "work",
        *,
        backend: str = "pytorchjob",
        training: Mapping[str, Any] = MappingProxyType({}),
        **job: Any,
    ) -> None:
        super().__init__(grounds, "train", claims={"/work": work_claim, "/data": "data"})
        settings = {
            "run_id": self.run_id,
            "task_name": "train",
            "task_id": "",
            "dataset_path": "/data",
            "backend": backend,
            "training": {**TRAINING, **training},
            "job": {**JOB, **job},
        }
        self.program(TRAIN, settings)


@pytest.mark.smoke
def test_a_killed_rank_resumes_from_a_checkpoint(grounds: Grounds, work: Folder) -> None:
    step = TrainStep(grounds, training={"epochs": 40}, nodes=2, retries=1).start()
    step.saw("epoch 4/")
    first = min(step.workers(), key=lambda pod: pod.metadata.name)
    kill = "import os, psutil; [p.kill() for p in psutil.process_iter() if p.pid != os.getpid()]"
    run_in(grounds, first.metadata.name, ["python3", "-c", kill], "pytorch")
    assert step.wait() == "Succeeded", step.log()
    assert "retrying, 1 of 1 retries left" in step.log()
    events = work.events(f"{step.run_id}/train/metrics.jsonl")
    resumed = [e["resumed_from_step"] for e in events if e["event"] == "start"]
    assert resumed[0] == 0
    assert resumed[1] >= 3
    assert max(e["step"] for e in events if e["event"] == "step") == 120


STOP_RANK = """
import psutil, signal
node = psutil.Process(1)
for each in node.children(recursive=True):
    if "kfp_ddp.training" in each.cmdline():
        each.send_signal(signal.SIGSTOP)
        print("stopped", each.pid)
"""


def test_stalled_rank_is_named_and_its_node_avoided(grounds: Grounds, work: Folder) -> None:
    """It lives, its pod runs, and its peers wait for it in a collective."""
    step = TrainStep(
        grounds, training={"epochs": 120}, nodes=2, retries=1, stall_minutes=0.8, grace_seconds=5
    ).start()
    step.saw("epoch 4/")
    second = max(step.workers(), key=lambda pod: pod.metadata.name)
    assert "stopped" in run_in(
        grounds, second.metadata.name, ["python3", "-c", STOP_RANK], "pytorch"
    )
    step.saw("retrying, 1 of 1 retries left")
    report = next(line for line in step.log().splitlines() if "; it is ended" in line)
    where = f"(worker-1 on node {second.spec.node_name})"
    assert f"no rank has advanced for 0.8 minutes: rank 1 {where} is silent at step " in report
    assert step.wait() == "Succeeded", step.log()
    (job,) = step.jobs()
    assert job["metadata"]["annotations"]["kfp-ddp/avoids"] == second.spec.node_name
    events = work.events(f"{step.run_id}/train/metrics.jsonl")
    resumed_from = [item["resumed_from_step"] for item in events if item["event"] == "start"]
    assert resumed_from[0] == 0
    assert resumed_from[1] >= 3
    assert events[-1]["status"] == "done"


def test_first_worker_lost_before_the_rendezvous_is_retried(grounds: Grounds) -> None:
    """Its successor and the other worker would wait for each other without a word."""
    step = TrainStep(grounds, nodes=2, retries=1)
    step.start()
    until(lambda: len(_running(step)) == 2, "two running pods")
    first, worker = sorted(_running(step))
    ranks = ["python3", "-c", "import psutil; print(len(psutil.Process(1).children()))"]
    until(lambda: run_in(grounds, worker, ranks, "pytorch").strip() != "0", "the worker's rank")
    grounds.core.delete_namespaced_pod(first, grounds.namespace, grace_period_seconds=0)
    assert step.wait() == "Succeeded", step.log()
    assert "worker-0: its pod was removed while it ran; retrying, 1 of 1" in step.log()


@pytest.mark.slow
def test_ranks_wait_for_a_worker_260_seconds_late(grounds: Grounds) -> None:
    """A cold node takes as long to pull an image; the operator's own wait ends after 200."""
    with gate_pods(grounds, 0) as release:
        step = TrainStep(grounds, nodes=2, retries=0).start(600)
        until(lambda: len(step.workers()) == 2, "two pods")
        start_time = time.monotonic()
        while time.monotonic() - start_time < 260:
            assert step.attempts[-1].ended is None, step.log()
            time.sleep(5)
        release()
        assert step.wait() == "Succeeded", step.log()
    assert "step 6/6" in step.log()
    assert len(step.jobs()) == 1


def _running(step: Step) -> list[str]:
    return [p.metadata.name for p in step.workers() if p.status.phase == "Running"]


def test_training_resumes_after_a_full_pvc(grounds: Grounds) -> None:
    claim(grounds, "tight", "small", "8Mi")
    with lands.serve_files(grounds, "tight") as tight, _filler(grounds, "tight") as filler:
        step = TrainStep(
            grounds, "tight", training={"epochs": 60, "checkpoint_epochs": 2}, nodes=2
        ).start()
        step.saw("epoch 7/")
        run_in(grounds, filler, ["dd", "if=/dev/zero", "of=/work/filler", "bs=4k"])
        assert step.wait() == "Failed"
        last = step.log().splitlines()[-1]
        assert "No space left on device" in last, step.log()
        assert "make room or repair the volume and start again to resume" in last
        assert "retries left" not in step.log()
        folder = f"{step.run_id}/train/checkpoints"
        checkpoints = tight.names(folder)
        assert checkpoints
        for name in checkpoints:
            _verify(tight, f"{folder}/{name}")

        run_in(grounds, filler, ["rm", "/work/filler"])
        step.kill()
        assert step.start().wait() == "Succeeded", step.log()
        events = tight.events(f"{step.run_id}/train/metrics.jsonl")
        resumed_from = [item["resumed_from_step"] for item in events if item["event"] == "start"]
        assert resumed_from == [0, max(int(name.strip("/")[5:]) for name in checkpoints)]
        assert events[-1]["status"] == "done"


def _verify(folder: Folder, path: str) -> None:
    manifest, state = folder.read(f"{path}manifest.json"), folder.read(f"{path}state.pt")
    assert manifest is not None, path
    assert state is not None, path
    report = json.loads(manifest)["files"]["state.pt"]
    assert (report["size"], report["sha256"]) == (len(state), hashlib.sha256(state).hexdigest())


@contextmanager
def _filler(grounds: Grounds, claim_name: str) -> Iterator[str]:
    """A pod that can write to a claim; its name."""
    pod = step_pod.bare("filler", ["sleep", "600"], work=claim_name)
    grounds.core.create_namespaced_pod(grounds.namespace, pod)

    def runs() -> bool:
        result = grounds.core.read_namespaced_pod("filler", grounds.namespace)
        return bool(result.status.phase == "Running")

    until(runs, "the pod that fills the claim")
    yield "filler"
    grounds.core.delete_namespaced_pod("filler", grounds.namespace, grace_period_seconds=0)


@pytest.mark.parametrize("backend", ["pytorchjob", "trainjob"])
def test_a_worker_cannot_write_to_its_dataset(grounds: Grounds, backend: str) -> None:
    """The kernel says so, of files that the worker's user owns; the work claim it can write."""
    step = TrainStep(
        grounds, backend=backend, training={"epochs": 4000}, nodes=2, retries=0
    ).start()
    step.saw("epoch 1/")
    pods = step.workers()
    message = [
        run_in(grounds, pod.metadata.name, ["python3", "-c", WRITE], CONTAINER[backend])
        for pod in pods
    ]
    step.terminate()
    expected = ["/data/new EROFS", "/data/train/dark/0.png EROFS", "/work/new written"]
    assert len(pods) == 2
    for item in message:
        assert item.splitlines() == expected
    assert step.wait() == "Failed"


def test_a_job_without_its_step_stops_with_a_checkpoint(grounds: Grounds, work: Folder) -> None:
    step = TrainStep(grounds, training={"epochs": 4000}, heartbeat_minutes=0.5, retries=0).start()
    step.saw("epoch 3/")
    step.kill()

    def over() -> bool:
        (now,) = step.jobs()
        conditions = now["status"].get("conditions") or []
        return any(c["type"] == "Failed" and c["status"] == "True" for c in conditions)

    until(over, "the end of the job", 120)
    last = work.events(f"{step.run_id}/train/metrics.jsonl")[-1]
    assert (last["event"], last["status"]) == ("end", "preempted")
