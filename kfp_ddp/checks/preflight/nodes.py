"""How many GPUs a pod of the job asks for where nobody said, and which pod no node has room for."""

from collections.abc import Mapping, Sequence

from kfp_ddp.core.errors import InputError
from kfp_ddp.jobs.launch_spec import is_gpu
from kfp_ddp.k8s.api import ApiError, Object
from kfp_ddp.k8s.nodes import gpus

CHOOSE = "give gpus_per_node, 0 to train on CPUs"


def gpus_a_node(nodes: Sequence[Object] | ApiError, resource: str, wanted: int) -> int:
    """As many as `wanted` of the nodes have each, or the largest node where fewer have any.

    Args:
        nodes: Those of the cluster, or why they cannot be seen.
        resource: Name of a GPU, such as nvidia.com/gpu.
        wanted: Pods of the job.

    Raises:
        InputError: no node has one, or this account may not look.
    """
    if isinstance(nodes, ApiError):
        raise InputError(
            f"whether nodes have GPUs cannot be seen ({nodes.message}): {CHOOSE}, "
            "or apply deploy/rbac/nodes"
        )
    every = gpus(nodes)
    counts = every.get(resource, [])
    if counts:
        return counts[wanted - 1] if wanted <= len(counts) else counts[0]
    if others := sorted(name for name in every if is_gpu(name)):
        raise InputError(
            f"no node has {resource}, but there is {', '.join(others)}: "
            f'set job={{"gpu_resource": "{others[0]}"}}, or {CHOOSE}'
        )
    raise InputError(
        f"no node has {resource}: {CHOOSE}, or the number that an autoscaler's nodes will have"
    )


def unused(nodes: Sequence[Object] | ApiError, resource: str) -> str:
    """What is said of a job without GPUs: that it is one, and which GPUs it leaves idle."""
    said = "no GPU is asked for (gpus_per_node=0): this trains on CPUs"
    if isinstance(nodes, ApiError):
        return said
    there = gpus(nodes)
    idle = [f"{sum(there[n])} {n}" for n in sorted(there) if n == resource or is_gpu(n)]
    return f"{said}, though nodes have {' and '.join(idle)}" if idle else said


def no_room(nodes: Sequence[Object] | ApiError, pods: Mapping[str, Mapping[str, str]]) -> list[str]:
    """A warning for each pod that is larger than every node, which would wait for one for ever.

    Args:
        nodes: Those of the cluster, or why they cannot be seen.
        pods: What each asks for, by its name and the name of the resource.
    """
    from kubernetes.utils.quantity import parse_quantity

    if isinstance(nodes, ApiError) or not nodes:
        return []
    there = [node["status"].get("allocatable") or {} for node in nodes]
    found = []
    for pod, asked in pods.items():
        wanted = {name: parse_quantity(amount) for name, amount in asked.items() if amount}
        if not any(
            all(parse_quantity(have.get(name, "0")) >= wanted[name] for name in wanted)
            for have in there
        ):
            what = " and ".join(f"{asked[name]} {name}" for name in wanted)
            less = "lower evaluate_gpus, or " if any(map(is_gpu, wanted)) else ""
            found.append(
                f"{pod} asks for {what}, which no node has: it waits unless nodes are added by "
                f"themselves; {less}add one that has"
            )
    return found
