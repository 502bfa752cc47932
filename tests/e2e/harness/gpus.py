"""GPUs that only count: an extended resource of the node, as its administrator may advertise it."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kubernetes import client

from tests.e2e.harness.grounds import until

GPU = "kfp-ddp.test/gpu"


@contextmanager
def advertise_gpus(api: client.ApiClient, count: int) -> Iterator[str]:
    """Give the first node `count` of them during the block, and yield their name."""
    with lock_gpus(), _advertise(client.CoreV1Api(api), count):
        yield GPU


@contextmanager
def lock_gpus() -> Iterator[None]:
    """Let no other test process advertise GPUs during the block: the node is one for all."""
    with Path(__file__).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _advertise(core: client.CoreV1Api, count: int) -> Iterator[None]:
    node = core.list_node().items[0].metadata.name
    path = "/status/capacity/" + GPU.replace("~", "~0").replace("/", "~1")
    core.patch_node_status(node, [{"op": "add", "path": path, "value": str(count)}])

    def allocatable() -> bool:
        return bool(core.read_node(node).status.allocatable.get(GPU) == str(count))

    try:
        until(allocatable, f"{GPU} on {node}", 60)
        yield
    finally:
        core.patch_node_status(node, [{"op": "remove", "path": path}])
        until(lambda: GPU not in core.read_node(node).status.allocatable, f"no {GPU}", 60)
