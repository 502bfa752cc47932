"""Compare the capacity of nodes with the requests of pods."""

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from kfp_ddp.checks.finding import CheckContext, Finding
from kfp_ddp.core.errors import InputError, Problem
from kfp_ddp.jobs.fields import is_gpu
from kfp_ddp.k8s.api import ApiError, Object
from kfp_ddp.k8s.objects import allocatable, parse_quantity
from kfp_ddp.plan.form import StepResources
from kfp_ddp.training.spec.config import TrainConfig

CHOOSE = "give gpus_per_node, 0 to train on CPUs"
DRIVER = 580
"""Oldest driver of CUDA 13, which the locked torch is built with (release notes of CUDA 13.0)."""
CAPABILITY = (7, 5)
"""Lowest compute capability that it supports."""
DRIVERS = ("cuda.driver-version.major", "cuda.driver.major")  # of new and of old releases
LABELS = (*DRIVERS, "gpu.compute.major", "gpu.compute.minor")


def gpus_per_node(nodes: Sequence[Object] | ApiError, resource: str, pods: int) -> int:
    """Return the largest number of GPUs that `pods` nodes have each; raise InputError if none has.

    With fewer GPU nodes than pods, the number of the largest node.
    """
    if isinstance(nodes, ApiError):
        raise InputError(
            f"whether nodes have GPUs cannot be seen ({nodes.message}): {CHOOSE}, "
            "or apply deploy/rbac/nodes"
        )
    by_resource = allocatable(nodes)
    counts = by_resource.get(resource, [])
    if counts and "/mig-" in resource:
        return 1  # CUDA gives a process no more of such parts
    if counts:
        # The counts start with the largest node.
        return counts[pods - 1] if pods <= len(counts) else counts[0]
    others = sorted(name for name in by_resource if is_gpu(name))
    if others:
        raise InputError(
            f"no node has {resource}, but there is {', '.join(others)}: "
            f'set job={{"gpu_resource": "{others[0]}"}}, or {CHOOSE}'
        )
    raise InputError(
        f"no node has {resource}: {CHOOSE}, or the number that an autoscaler's nodes will have"
    )


def cpu_warning(nodes: Sequence[Object] | ApiError, resource: str) -> str:
    """Return the warning about a job without GPUs, with the GPUs that are not used."""
    warning = "no GPU is requested (gpus_per_node=0): this trains on CPUs"
    if isinstance(nodes, ApiError):
        return warning
    totals = _gpu_totals(nodes, resource)
    if not totals:
        return warning
    unused = [f"{totals[name]} {name}" for name in sorted(totals)]
    return f"{warning}, though nodes have {' and '.join(unused)}"


def _gpu_totals(nodes: Sequence[Object], resource: str) -> dict[str, int]:
    """Return how many GPUs all nodes have together, by resource."""
    return {
        name: sum(counts)
        for name, counts in allocatable(nodes).items()
        if name == resource or is_gpu(name)
    }


def check_on_cpus(config: TrainConfig) -> None:
    """Raise InputError for a training that CPUs cannot compute."""
    for name, value in (("device", "cuda"), ("decode", "gpu")):
        if getattr(config, name) == value:
            raise InputError(
                f"{name}={value} needs GPUs, and gpus_per_node is 0: raise it, or set {name}=auto"
            )


def too_large(
    nodes: Sequence[Object] | ApiError, requests: Mapping[str, Mapping[str, str]]
) -> list[str]:
    """Return a warning for each pod that fits on no node: `requests` are amounts by resource."""
    if isinstance(nodes, ApiError):
        return []
    return [f"{pod} {problem}" for pod, problem in _too_large(nodes, requests)]


def _too_large(
    nodes: Sequence[Object], requests: Mapping[str, Mapping[str, str]]
) -> Iterator[tuple[str, Problem]]:
    """Yield each pod that fits on no node, and why."""
    if not nodes:
        return
    capacities = [node["status"].get("allocatable") or {} for node in nodes]
    for pod, request in requests.items():
        amounts = {name: parse_quantity(value) for name, value in request.items() if value}
        if any(_has_room(capacity, amounts) for capacity in capacities):
            continue
        what = " and ".join(f"{request[name]} {name}" for name in amounts)
        less = "lower evaluate_gpus, or " if any(map(is_gpu, amounts)) else ""
        problem = Problem(
            f"requests {what}, which no node has: it waits unless an autoscaler adds nodes",
            f"{less}add one that has",
        )
        yield pod, problem


def _has_room(capacity: Mapping[str, str], amounts: Mapping[str, Fraction]) -> bool:
    return all(
        parse_quantity(capacity.get(name, "0")) >= amount for name, amount in amounts.items()
    )


def unfit(nodes: Sequence[Object] | ApiError, resource: str) -> list[str]:
    """Return a warning for each GPU or driver, by NVIDIA's labels, that our images cannot use."""
    if isinstance(nodes, ApiError):
        return []
    return [f"{problem.what}: {problem.remedy}" for problem in _unfit(nodes, resource)]


def _unfit(nodes: Sequence[Object], resource: str) -> list[Problem]:
    """Return each GPU or driver that our images cannot use, with the first node that has it."""
    first_nodes: dict[tuple[str, str], str] = {}
    for node in nodes:
        if not allocatable([node]).get(resource):
            continue
        labels = node["metadata"].get("labels") or {}
        problem = _gpu_problem(labels, resource)
        if problem:
            gpu = labels.get("nvidia.com/gpu.product", "its GPU")
            first_nodes.setdefault((gpu, problem), node["metadata"]["name"])
    remedy = (
        "choose other nodes by job.node_selector, or set job.image to an image with torch for it"
    )
    return [
        Problem(f"{gpu} of node {name} has {problem}", remedy)
        for (gpu, problem), name in first_nodes.items()
    ]


class _Gpu(NamedTuple):
    """What the labels of a node tell of its GPUs; -1 where they tell nothing."""

    driver: int
    capability: tuple[int, int]


def _gpu_of(labels: Mapping[str, str]) -> _Gpu:
    texts = [labels.get(f"nvidia.com/{name}", "") for name in LABELS]
    numbers = [int(text) if text.isdecimal() else -1 for text in texts]
    new, old, major, minor = numbers
    return _Gpu(max(new, old), (major, minor))


def _gpu_problem(labels: Mapping[str, str], resource: str) -> str:
    """Return why our images cannot use the GPUs of a node; '' if they can, as far as is known."""
    if resource.startswith("amd.com/"):
        return f"{resource}, which needs ROCm, and our images have CUDA"
    driver, capability = _gpu_of(labels)
    if min(capability) >= 0 and capability < CAPABILITY:
        major, minor = capability
        return f"compute capability {major}.{minor}, which CUDA 13 does not support"
    if 0 <= driver < DRIVER:
        return f"driver {driver}, and CUDA 13 of our images needs {DRIVER}"
    return ""


def gpus(cluster: CheckContext) -> list[Finding]:
    """Check that enough nodes have enough GPUs."""
    if cluster.nodes is None:
        remedy = "run it with an account that may list nodes"
        return [Finding("warn", "GPUs", "nodes may not be listed", remedy)]
    run = cluster.run
    totals = _gpu_totals(cluster.nodes, run.gpu_resource)
    listed = ", ".join(f"{totals[name]} {name}" for name in sorted(totals)) or "no node has one"
    if run.gpus_per_node == 0 or run.backend == "local":
        return [Finding("ok", "GPUs", f"{listed}; none are requested: training runs on CPUs")]
    counts = allocatable(cluster.nodes).get(run.gpu_resource, [])
    if not counts and totals:
        remedy = f'set job={{"gpu_resource": "{min(totals)}"}}, here --gpu-resource'
        return [Finding("bad", "GPUs", f"{listed}, and no {run.gpu_resource}", remedy)]
    if not counts and run.gpus_per_node < 0:
        remedy = "give gpus_per_node: as many as an autoscaler's nodes will have, or 0 for CPUs"
        return [Finding("bad", "GPUs", listed, remedy)]
    enough = sum(count >= run.gpus_per_node for count in counts)
    if enough < run.nodes:
        wanted = f"{max(run.gpus_per_node, 1)} of them, {run.nodes} requested"
        message = f"{listed}; {enough} node(s) with {wanted}"
        return [Finding("warn", "GPUs", message, "request fewer, unless an autoscaler adds nodes")]
    unusable = _unfit(cluster.nodes, run.gpu_resource)
    if unusable:
        return [Finding("warn", "GPUs", unusable[0].what, unusable[0].remedy)]
    return [Finding("ok", "GPUs", listed)]


def room(cluster: CheckContext) -> list[Finding]:
    """Check that each step with default resources fits on a node."""
    requests = StepResources().requests_by_step(cluster.run.gpu_resource)
    return [
        Finding("warn", f"room for {step}", problem.what, problem.remedy)
        for step, problem in _too_large(cluster.nodes or (), requests)
    ]
