"""GPUs that only count: an extended resource of the node, as its administrator may advertise it."""

from collections.abc import Iterator
from contextlib import contextmanager

from kubernetes import client

from tests.e2e.harness.grounds import until

GPU = "kfp-ddp.test/gpu"


@contextmanager
def advertised(api: client.ApiClient, count: int) -> Iterator[str]:
    """Let the first node have `count` of them while the block lasts; their name."""
    core = client.CoreV1Api(api)
    node = core.list_node().items[0].metadata.name
    path = "/status/capacity/" + GPU.replace("~", "~0").replace("/", "~1")
    core.patch_node_status(node, [{"op": "add", "path": path, "value": str(count)}])

    def allocatable() -> bool:
        return bool(core.read_node(node).status.allocatable.get(GPU) == str(count))

    try:
        until(allocatable, f"{GPU} on {node}", 60)
        yield GPU
    finally:
        core.patch_node_status(node, [{"op": "remove", "path": path}])
