"""The rank that failed first stands in the step's error, whichever node it ran on."""

from collections.abc import Iterator

import pytest
from kubernetes import client

from tests.e2e.harness import workflow
from tests.e2e.harness.fixtures import cluster  # noqa: F401
from tests.e2e.harness.grounds import Grounds
from tests.e2e.harness.scene import namespace
from tests.e2e.launch_step import LaunchStep

pytestmark = pytest.mark.smoke

TITLE = {"pytorchjob": "worker-1", "trainjob": "node-1"}
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
def grounds(cluster: client.ApiClient) -> Iterator[Grounds]:  # noqa: F811
    workflow.define(cluster)
    with namespace(cluster) as space:
        yield space


@pytest.mark.parametrize("kind", ["pytorchjob", "trainjob"])
def test_of_two_nodes_the_second_fails_first_and_is_named(grounds: Grounds, kind: str) -> None:
    spec = {"kind": kind, "nodes": 2, "nproc_per_node": 1, "script": SECOND_FAILS, "retries": 0}
    step = LaunchStep(grounds, spec).start()
    assert step.wait() == "Failed"
    last = step.log().splitlines()[-1]
    assert f"{TITLE[kind]}: rank 1: ValueError: no such layer" in last, step.log()
