"""Launching TrainJobs, with the step as a pod under the stock account and the Role of deploy/."""

from collections.abc import Iterator

import pytest
from kubernetes import client

from tests.e2e.harness import workflow
from tests.e2e.harness.grounds import Grounds, claim, until
from tests.e2e.harness.scene import namespace
from tests.e2e.launch_step import TRAINJOB, LaunchStep, python

COUNT = """
import os, time
for number in range({count}):
    print("node", os.environ["PET_NODE_RANK"], "line", number)
    time.sleep({pause})
"""

# Rank 1 is on the second node; rank 0 is told by gloo that its peer went away, and fails too.
SECOND_FAILS = """
import time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for step in range(600):
    if dist.get_rank() == 1 and step == 5:
        raise ValueError("no such layer")
    dist.all_reduce(torch.ones(1))
    time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def grounds(cluster: client.ApiClient) -> Iterator[Grounds]:
    workflow.define(cluster)
    with namespace(cluster) as space:
        claim(space, "work")
        yield space


def trainjob(code: str, **more: object) -> dict[str, object]:
    return {"kind": "trainjob", **python(code), **more}


def test_a_trainjob_is_followed_to_its_end(grounds: Grounds) -> None:
    spec = trainjob(COUNT.format(count=20, pause=0.05), nodes=2, claims={"/work": "work"})
    step = LaunchStep(grounds, spec).start()
    assert step.wait() == "Succeeded", step.log()
    for node in ("0", "1"):
        marked = [x for x in step.log().splitlines() if x.startswith(f"[node-{node}] node {node}")]
        assert [int(line.rsplit(" ", 1)[1]) for line in marked] == list(range(20))
    (job,) = step.jobs(TRAINJOB)
    assert step.log().splitlines()[-1] == f"DONE {job['metadata']['name']} 1"


@pytest.mark.smoke
def test_a_cancelled_run_loses_its_trainjob(grounds: Grounds) -> None:
    step = LaunchStep(grounds, trainjob(COUNT.format(count=1000, pause=0.1))).start()
    step.saw("line 1")
    step.terminate()
    until(lambda: step.jobs(TRAINJOB) == [], "the job's deletion", 2)
    assert step.wait() == "Failed"
    until(lambda: step.workers() == [], "the pods' end", 60)


def test_a_deadline_that_passed_without_a_step_is_not_retried(grounds: Grounds) -> None:
    """Ranks that are stopped leave as if their node were taken, when the step is back again."""
    stop = "import signal, sys, time; stop = lambda *_: (time.sleep(7), sys.exit(143))"
    code = f"{stop}; signal.signal(signal.SIGTERM, stop){COUNT.format(count=2000, pause=0.1)}"
    step = LaunchStep(grounds, trainjob(code, deadline_minutes=0.3, grace_seconds=30)).start()
    step.saw("line 1")
    step.kill()
    assert step.wait() == "Lost"

    def failed() -> bool:
        (job,) = step.jobs(TRAINJOB)
        conditions = job["status"].get("conditions") or []
        return any(item.get("reason") == "DeadlineExceeded" for item in conditions)

    until(failed, "the operator's deadline", 120)
    step.start()
    assert step.wait() == "Failed"
    assert "it took longer than deadline_minutes=0.3 and was ended" in step.log().splitlines()[-1]
    assert "retrying" not in step.log()
    assert len(step.jobs(TRAINJOB)) == 1


@pytest.mark.smoke
@pytest.mark.parametrize(("kind", "title"), [("pytorchjob", "worker-1"), ("trainjob", "node-1")])
def test_the_rank_that_fails_first_is_named(grounds: Grounds, kind: str, title: str) -> None:
    spec = {"kind": kind, "nodes": 2, "nproc_per_node": 1, "script": SECOND_FAILS, "retries": 0}
    step = LaunchStep(grounds, spec).start()
    assert step.wait() == "Failed"
    last = step.log().splitlines()[-1]
    assert f"{title}: rank 1: ValueError: no such layer" in last, step.log()
