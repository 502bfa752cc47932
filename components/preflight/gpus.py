"""How many GPUs a pod of the job asks for, where nobody said."""

from kfp_ddp.base.errors import InputError
from kfp_ddp.components.shared.cluster.api import Api, ApiError

CHOOSE = "give gpus_per_node, 0 to train on CPUs"


def gpus_of_nodes(api: Api, resource: str, nodes: int) -> int:
    """As many as `nodes` of the cluster's nodes have each, or the largest node where fewer do.

    Args:
        api: Asks the cluster.
        resource: Name of a GPU, such as nvidia.com/gpu.
        nodes: Pods of the job.

    Raises:
        InputError: no node has one, or this account may not look.
    """
    try:
        found = api.patient(lambda: api.call("GET", "/api/v1/nodes"))["items"]
    except ApiError as error:
        raise InputError(
            f"whether nodes have GPUs cannot be seen ({error.message}): {CHOOSE}, "
            "or apply deploy/rbac/nodes"
        ) from error
    counts = [int(node["status"].get("allocatable", {}).get(resource, 0)) for node in found]
    counts = sorted(filter(None, counts), reverse=True)
    if not counts:
        raise InputError(
            f"no node has {resource}: {CHOOSE}, or the number that an autoscaler's nodes will have"
        )
    return counts[nodes - 1] if nodes <= len(counts) else counts[0]
