"""Launching, following and ending PyTorchJobs and TrainJobs, with the step as a pod."""

from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes import client

from kfp_ddp.jobs.kinds import KINDS
from kfp_ddp.k8s.api import Api
from tests.e2e.harness import workflow
from tests.e2e.harness.grounds import Grounds, claim, until
from tests.e2e.harness.launch_step import LaunchStep, python
from tests.e2e.harness.namespace import namespace

COUNT = """
import os, time
for number in range({count}):
    print("rank", os.environ.get("RANK") or os.environ["PET_NODE_RANK"], "line", number)
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
SECRET = {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "absent", "key": "key"}}}


@pytest.fixture(scope="module")
def grounds(cluster: client.ApiClient) -> Iterator[Grounds]:
    """A namespace whose steps have no more than KFP's own rights."""
    workflow.define(cluster)
    with namespace(cluster, ours=False) as space:
        claim(space, "work")
        yield space


@pytest.fixture(scope="module")
def deploy_grounds(cluster: client.ApiClient) -> Iterator[Grounds]:
    """A namespace whose steps have the rights in deploy/, which TrainJobs need."""
    workflow.define(cluster)
    with namespace(cluster) as space:
        yield space


@pytest.fixture
def space(request: pytest.FixtureRequest, kind: str) -> Grounds:
    """Return the namespace for a kind of job."""
    name = "grounds" if kind == "pytorchjob" else "deploy_grounds"
    grounds: Grounds = request.getfixturevalue(name)
    return grounds


def lines(log: str, who: str) -> list[int]:
    """The numbers that a worker counted, in the order they were shown."""
    marked = [line for line in log.splitlines() if line.startswith(f"[{who}] rank")]
    return [int(line.rsplit(" ", 1)[1]) for line in marked]


@pytest.mark.parametrize(("kind", "title"), [("pytorchjob", "worker"), ("trainjob", "node")])
def test_output_and_result_of_a_job(space: Grounds, kind: str, title: str) -> None:
    spec = {"kind": kind, "nodes": 2, **python(COUNT.format(count=20, pause=0.05))}
    step = LaunchStep(space, spec).start()
    assert step.wait() == "Succeeded", step.log()
    assert lines(step.log(), f"{title}-0") == list(range(20))
    assert lines(step.log(), f"{title}-1") == list(range(20))
    (job,) = step.jobs(kind)
    assert step.log().splitlines()[-1] == f"DONE {job['metadata']['name']}"
    (owner,) = job["metadata"]["ownerReferences"]
    assert owner["uid"] == step.workflow["metadata"]["uid"]
    assert owner["controller"] is False
    assert owner["blockOwnerDeletion"] is False


@pytest.mark.smoke
@pytest.mark.parametrize("kind", ["pytorchjob", "trainjob"])
def test_cancelled_run_deletes_its_job_before_any_signal(space: Grounds, kind: str) -> None:
    spec = {"kind": kind, **python(COUNT.format(count=1000, pause=0.1))}
    step = LaunchStep(space, spec).start()
    step.saw("line 1")
    step.terminate()
    until(lambda: step.jobs(kind) == [], "the job's deletion", 2)
    assert step.wait() == "Failed"
    assert f"error: the run was terminated; {KINDS[kind].title}" in step.log()
    until(lambda: step.workers() == [], "the pods' end", 60)


@pytest.mark.smoke
def test_step_after_a_kill_adopts_the_job(grounds: Grounds) -> None:
    spec = python(COUNT.format(count=200, pause=0.1))
    step = LaunchStep(grounds, spec, work_claim="work").start()
    step.saw("line 5")
    step.freeze()  # what a removed pod writes until it ends cannot be read
    step.kill()
    assert step.wait() == "Lost"
    step.start()
    assert step.wait() == "Succeeded", step.log()
    assert len(step.jobs()) == 1
    assert set(lines(step.log(), "worker-0")) == set(range(200))


def test_foreign_job_of_the_same_name_is_not_changed(grounds: Grounds) -> None:
    first = LaunchStep(grounds, python("print('mine')")).start()
    assert first.wait() == "Succeeded"
    (job,) = first.jobs()
    api = Api(grounds.api, grounds.namespace)
    path = KINDS["pytorchjob"].resource.path(grounds.namespace, job["metadata"]["name"])
    api.call("PATCH", path, {"metadata": {"labels": {"kfp-ddp/run-id": "somebody-else"}}})
    second = LaunchStep(grounds, python("print('mine')"), run_id=first.run_id).start()
    assert second.wait() == "Failed"
    assert "exists and is not of this run (run somebody-else); it was not changed" in second.log()
    assert api.call("GET", path)["metadata"]["uid"] == job["metadata"]["uid"]


# What can never start, with the rights of whoever may read events, and what is said of it.
UNSTARTABLE: dict[str, tuple[dict[str, Any], str]] = {
    "image name": ({"image": "Not/A_Name:1"}, "cannot pull Not/A_Name:1 (InvalidImageName: "),
    "config": (
        {"env_vars": [SECRET]},
        'cannot start (CreateContainerConfigError: secret "absent" not found)',
    ),
    "user": ({"run_as_user": 0}, "cannot start (CreateContainerConfigError: "),
}


def test_container_that_cannot_start_ends_the_job(grounds: Grounds) -> None:
    steps = {
        name: LaunchStep(grounds, {"nodes": 2, **python("print(1)"), **spec}).start()
        for name, (spec, _) in UNSTARTABLE.items()
    }
    for name, step in steps.items():
        assert step.wait(150) == "Failed"
        last = step.log().splitlines()[-1]
        assert UNSTARTABLE[name][1] in last, f"{name}: {step.log()}"
        assert "cannot start and was deleted" in last
        assert step.jobs() == []


@pytest.mark.parametrize("events", [True, False])
def test_forbidden_pods_end_the_job(cluster: client.ApiClient, events: bool) -> None:
    """With the rights of `deploy/rbac` events tell; with KFP's own the API server is asked."""
    with namespace(cluster, ours=events) as space:
        hard = {"hard": {"limits.memory": "512Mi"}}
        space.core.create_namespaced_resource_quota(
            space.namespace, {"metadata": {"name": "memory"}, "spec": hard}
        )
        step = LaunchStep(space, {"memory": "512Mi", **python("print(1)")})
        limits = {"limits": {"memory": "512Mi"}}
        step.pod["spec"]["containers"][0]["resources"] |= limits
        assert step.start().wait(150) == "Failed"
        last = step.log().splitlines()[-1]
        assert "no pods yet: " in last, step.log()
        assert "exceeded quota: memory" in last
        assert step.jobs() == []


@pytest.mark.parametrize(("kind", "title"), [("pytorchjob", "worker-1"), ("trainjob", "node-1")])
def test_first_failed_rank_is_named(space: Grounds, kind: str, title: str) -> None:
    spec = {"kind": kind, "nodes": 2, "nproc_per_node": 1, "script": SECOND_FAILS, "retries": 0}
    step = LaunchStep(space, spec).start()
    assert step.wait() == "Failed"
    last = step.log().splitlines()[-1]
    assert f"{title}: rank 1: ValueError: no such layer" in last, step.log()
