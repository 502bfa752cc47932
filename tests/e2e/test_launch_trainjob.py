"""Launching TrainJobs, with the step as a pod under the stock account and the Role of deploy/."""

from collections.abc import Iterator

import pytest
from kubernetes import client

from tests.e2e.harness import workflow
from tests.e2e.harness.fixtures import cluster  # noqa: F401
from tests.e2e.harness.grounds import Grounds, claim, until
from tests.e2e.harness.scene import namespace
from tests.e2e.launch_step import TRAINJOB, LaunchStep, python

COUNT = """
import os, time
for number in range({count}):
    print("node", os.environ["PET_NODE_RANK"], "line", number)
    time.sleep({pause})
"""


@pytest.fixture(scope="module")
def grounds(cluster: client.ApiClient) -> Iterator[Grounds]:  # noqa: F811
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


def test_a_failing_trainjob_is_named_and_not_tried_again(grounds: Grounds) -> None:
    step = LaunchStep(grounds, trainjob("raise ValueError('no such layer')")).start()
    assert step.wait() == "Failed"
    last = step.log().splitlines()[-1]
    assert "node-0: exit code 1: ValueError: no such layer" in last, step.log()
    assert "retries left" not in step.log()
    # Its container restarts in place, so the job may have to be deleted to end it.
    assert len(step.jobs(TRAINJOB)) <= 1


def test_a_cancelled_run_loses_its_trainjob(grounds: Grounds) -> None:
    step = LaunchStep(grounds, trainjob(COUNT.format(count=1000, pause=0.1))).start()
    step.saw("line 1")
    step.terminate()
    until(lambda: step.jobs(TRAINJOB) == [], "the job's deletion", 2)
    assert step.wait() == "Failed"
    until(lambda: step.workers() == [], "the pods' end", 60)


def test_a_runtime_that_is_not_there_is_one_line(grounds: Grounds) -> None:
    step = LaunchStep(grounds, trainjob("print(1)", runtime="nowhere")).start()
    assert step.wait() == "Failed"
    last = step.log().splitlines()[-1]
    assert last.startswith("error: ")
    assert "nowhere" in last, step.log()
