"""Jobs in a queue of the real Kueue: waiting, let in, preempted, cancelled, never let in."""

# ruff: noqa: F811 (fixtures that are imported)

import json
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest
from kubernetes import client

from kfp_ddp.core.text import one_line
from kfp_ddp.jobs.kinds import KINDS
from kfp_ddp.k8s.api import Api
from tests.e2e.harness import queues, rights
from tests.e2e.harness.grounds import Folder, Grounds, until
from tests.e2e.harness.launch_step import LaunchStep, Step, python
from tests.e2e.harness.namespace import namespace
from tests.e2e.harness.programs import kfp_ddp
from tests.e2e.harness.queues import Queue
from tests.e2e.test_launch_train_step import TrainStep, grounds, work  # noqa: F401

EPOCHS = 100
COUNT = """
import time
for number in range(10):
    print("line", number)
    time.sleep(0.05)
"""
# Its end takes longer than what preempted it; let in again, it is done at once.
SLOW_END = """
import os, signal, sys, time
from pathlib import Path
def end(*_):
    time.sleep(10)
    sys.exit(143)
signal.signal(signal.SIGTERM, end)
mark = Path(f"/work/{os.environ['MARK']}-{os.environ['RANK']}")
if not mark.exists():
    mark.touch()
    print("the first time")
    time.sleep(600)
print("again")
"""


@pytest.fixture(scope="module", autouse=True)
def kueue(cluster: client.ApiClient) -> None:
    if not queues.served(cluster):
        pytest.skip("the cluster has no Kueue")


@pytest.fixture
def queue(grounds: Grounds) -> Iterator[Queue]:
    """A queue for two pods of 20m, or for one job of the train step with two ranks."""
    with queues.queue(grounds, "110m") as created:
        yield created


def in_queue(queue: Queue, code: str = COUNT, **more: Any) -> dict[str, Any]:
    """The specification of a job of two pods in a queue."""
    # A TrainJob in a queue has the grace period of its runtime: it takes only the default.
    grace = {"grace_seconds": 120} if more.get("kind") == "trainjob" else {}
    spec = {"scheduler": "kueue", "queue": queue.name, "nodes": 2}
    return {**spec, **grace, **python(code), **more}


def saw_the_reason(queue: Queue, step: Step) -> None:
    """Wait until the log has what Kueue itself says of the step's job, which waits."""

    def shown() -> bool:
        return any(one_line(text) in step.log() for text in queue.reasons())

    until(shown, f"the reason of the queue in the log: {step.log()}")


def test_queued_job_waits_and_runs(queue: Queue) -> None:
    with queue.use_quota("80m") as other:
        step = LaunchStep(queue.grounds, in_queue(queue)).start()
        step.saw(f"waiting in queue {queue.name}, first in line, while Job {other} has the quota")
        saw_the_reason(queue, step)
        assert step.workers() == []
    assert step.wait() == "Succeeded", step.log()
    (job,) = step.jobs()
    assert step.log().splitlines()[-1] == f"DONE {job['metadata']['name']}"
    assert step.log().count("[worker-0] line 9") == 1


def test_a_job_larger_than_its_queue_waits(queue: Queue) -> None:
    """Time in the queue counts for no deadline, and a step that is lost there is succeeded."""
    queue.set_quota("30m")
    limits: dict[str, Any] = {"deadline_minutes": 0.5, "pending_minutes": 0.5}
    step = LaunchStep(queue.grounds, in_queue(queue, **limits), work_claim="work").start()
    step.saw("first in line (")
    saw_the_reason(queue, step)
    step.kill()
    assert step.wait() == "Lost"
    step.start()
    step.saw("adopting PyTorchJob")
    (job,) = step.jobs()
    until(lambda: age(job) > 32, "an age beyond its deadlines")
    queue.set_quota("110m")
    assert step.wait() == "Succeeded", step.log()
    assert [item["metadata"]["uid"] for item in step.jobs()] == [job["metadata"]["uid"]]


def age(job: dict[str, Any]) -> float:
    """Seconds since the job was made."""
    return time.time() - datetime.fromisoformat(job["metadata"]["creationTimestamp"]).timestamp()


def test_a_preempted_training_resumes(queue: Queue, work: Folder) -> None:
    """Without a single retry to spare: preemption is no failure."""
    step = TrainStep(
        queue.grounds,
        training={"epochs": EPOCHS},
        nodes=2,
        retries=0,
        scheduler="kueue",
        queue=queue.name,
    ).start()
    until(lambda: trained(step, work) >= 9, "the third epoch")
    (before,) = step.jobs()
    with queue.use_quota("80m", urgent=True) as other:
        step.saw(f"is queued: preempted (Preempted to accommodate Job {other} ")
        until(lambda: step.workers() == [], "the end of its pods", 60)
    assert step.wait() == "Succeeded", step.log()
    (after,) = step.jobs()
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert_went_on(step, work)


def recorded(step: Step, work: Folder) -> list[dict[str, Any]]:
    """What training has written of itself so far."""
    path = f"{step.run_id}/train/metrics.jsonl"
    return work.events(path) if work.read(path) else []


def trained(step: Step, work: Folder) -> int:
    """The last step of training that is done."""
    return max(
        (event["step"] for event in recorded(step, work) if event["event"] == "step"), default=0
    )


def assert_went_on(step: Step, work: Folder) -> None:
    """Stopped once with a checkpoint, gone on from it, each step and line once."""
    events = recorded(step, work)
    starts = [event["resumed_from_step"] for event in events if event["event"] == "start"]
    ends = [event["status"] for event in events if event["event"] == "end"]
    steps = [event["step"] for event in events if event["event"] == "step"]
    assert len(starts) == 2
    assert starts[0] == 0
    assert starts[1] >= 9
    assert ends == ["preempted", "done"]
    assert steps == list(range(1, 3 * EPOCHS + 1)), "each step is done once"
    epochs = [line for line in step.log().splitlines() if f"/{EPOCHS}" in line and "epoch" in line]
    assert len(epochs) == len(set(epochs))


def test_a_job_admitted_while_it_ends_is_replaced(queue: Queue) -> None:
    """The Training Operator holds its ending pods against it; that is no retry either."""
    spec = in_queue(queue, SLOW_END, claims={"/work": "work"}, grace_seconds=30, retries=0)
    step = LaunchStep(queue.grounds, {**spec, "env": {"MARK": queue.name}}, work_claim="work")
    step.start()
    step.saw("[worker-0] the first time")
    step.saw("[worker-1] the first time")
    with queue.use_quota("80m", urgent=True):
        pass  # it is gone as soon as it is let in
    assert step.wait() == "Succeeded", step.log()
    assert "retries left" not in step.log()
    assert step.log().count("[worker-0] again") == 1


def test_queued_trainjob_waits_and_runs(queue: Queue) -> None:
    with queue.use_quota("80m"):
        step = LaunchStep(queue.grounds, in_queue(queue, kind="trainjob")).start()
        saw_the_reason(queue, step)
        assert step.workers() == []
    assert step.wait() == "Succeeded", step.log()
    assert step.log().count("line 9") == 2
    assert len(step.jobs("trainjob")) == 1


def test_a_field_that_kueue_removes_is_named(cluster: client.ApiClient) -> None:
    """Of a TrainJob without a queue, which Kueue puts into that of the name `default`."""
    with namespace(cluster) as space, queues.queue(space, "110m", "default"):
        spec = {"kind": "trainjob", "nodes": 2, **python(COUNT)}
        step = LaunchStep(space, spec).start()
        assert step.wait() == "Failed"
        last = step.log().splitlines()[-1]
        assert "terminationGracePeriodSeconds and was deleted" in last, step.log()
        until(lambda: step.jobs("trainjob") == [], "the job's deletion", 5)


def test_a_suspended_trainjob_resumes(grounds: Grounds, work: Folder) -> None:
    """Suspended and resumed as a queue does it, where Kueue itself may be too old for TrainJobs."""
    step = TrainStep(
        grounds, backend="trainjob", training={"epochs": EPOCHS}, nodes=2, retries=0
    ).start()
    until(lambda: trained(step, work) >= 9, "the third epoch")
    (job,) = step.jobs("trainjob")
    suspend(grounds, job, True)
    step.saw("is queued: suspended")
    until(lambda: step.workers() == [], "the end of its pods", 60)
    suspend(grounds, job, False)
    assert step.wait() == "Succeeded", step.log()
    assert [item["metadata"]["uid"] for item in step.jobs("trainjob")] == [job["metadata"]["uid"]]
    assert_went_on(step, work)


def suspend(grounds: Grounds, job: dict[str, Any], value: bool) -> None:
    """Do what Kueue does when it takes a TrainJob back or lets it in."""
    path = KINDS["trainjob"].resource.path(grounds.namespace, job["metadata"]["name"])
    Api(grounds.api, grounds.namespace).call("PATCH", path, {"spec": {"suspend": value}})


@pytest.mark.parametrize("kind", ["pytorchjob", "trainjob"])
def test_run_cancelled_in_the_queue_is_cleaned_up(queue: Queue, kind: str) -> None:
    with queue.use_quota("80m") as other:
        step = LaunchStep(queue.grounds, in_queue(queue, kind=kind)).start()
        step.saw(f"first in line, while Job {other} has the quota")
        step.terminate()
        until(lambda: step.jobs(kind) == [], "the job's deletion", 5)
        assert step.wait() == "Failed"
        assert "the run was terminated" in step.log().splitlines()[-1]
        until(lambda: queue.waiting() == [], "the end of its place in the queue", 30)


def test_a_kind_that_kueue_does_not_manage_is_refused(queue: Queue) -> None:
    """Kueue knows the MPIJob of MPI Operator v2, not that of the Training Operator."""
    step = LaunchStep(queue.grounds, in_queue(queue, kind="mpijob")).start()
    assert step.wait() == "Failed"
    last = step.log().splitlines()[-1]
    assert "Kueue here does not manage mpijobs.kubeflow.org/v1" in last, step.log()
    assert step.jobs("mpijob") == []


def test_job_runs_without_rights_to_queues(cluster: client.ApiClient) -> None:
    with namespace(cluster, ours=False) as bare, queues.queue(bare, "110m") as queue:
        with queue.use_quota("80m"):
            step = LaunchStep(bare, in_queue(queue)).start()
            step.saw(f"is queued: waiting in queue {queue.name}")
        assert step.wait() == "Succeeded", step.log()
        assert "first in line" not in step.log()


def test_doctor_reports_inactive_queues(queue: Queue) -> None:
    result = examine(queue.grounds)
    assert result["queues of Kueue"] == ("ok", queue.name)
    queue.stop()
    until(lambda: examine(queue.grounds)["queues of Kueue"][0] == "warn", "the warning", 60)
    assert "is stopped" in examine(queue.grounds)["queues of Kueue"][1]


def examine(grounds: Grounds) -> dict[str, tuple[str, str]]:
    """What the doctor says of each thing: state and words."""
    where = ("--namespace", grounds.namespace, "--service-account", rights.RUNNER)
    result = json.loads(kfp_ddp("doctor", "--json", *where).stdout)["findings"]
    return {item["what"]: (item["state"], item["message"]) for item in result}
