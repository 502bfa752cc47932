"""Compare the capacity of nodes with the requests of pods."""

from collections.abc import Mapping, Sequence

from kfp_ddp.checks.finding import CheckContext, Finding
from kfp_ddp.core.errors import InputError
from kfp_ddp.jobs.fields import is_gpu
from kfp_ddp.k8s.api import ApiError, Object
from kfp_ddp.k8s.objects import allocatable, parse_quantity
from kfp_ddp.plan.form import StepResources
from kfp_ddp.training.spec.config import TrainConfig

CHOOSE = "give gpus_per_node, 0 to train on CPUs"
DRIVER, CAPABILITY = 580, (7, 5)
"""Oldest driver and compute capability of CUDA 13, which the locked torch is built with (release
notes of CUDA 13.0)."""
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
        return counts[pods - 1] if pods <= len(counts) else counts[0]
    if others := sorted(name for name in by_resource if is_gpu(name)):
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
    counts = allocatable(nodes)
    unused = [f"{sum(counts[n])} {n}" for n in sorted(counts) if n == resource or is_gpu(n)]
    return f"{warning}, though nodes have {' and '.join(unused)}" if unused else warning


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
    if isinstance(nodes, ApiError) or not nodes:
        return []
    capacities = [node["status"].get("allocatable") or {} for node in nodes]
    warnings = []
    for pod, request in requests.items():
        amounts = {name: parse_quantity(value) for name, value in request.items() if value}
        if not any(
            all(parse_quantity(capacity.get(name, "0")) >= amounts[name] for name in amounts)
            for capacity in capacities
        ):
            what = " and ".join(f"{request[name]} {name}" for name in amounts)
            less = "lower evaluate_gpus, or " if any(map(is_gpu, amounts)) else ""
            warnings.append(
                f"{pod} requests {what}, which no node has: it waits unless an autoscaler adds "
                f"nodes; {less}add one that has"
            )
    return warnings


def unfit(nodes: Sequence[Object] | ApiError, resource: str) -> list[str]:
    """Return a warning for each GPU or driver, by NVIDIA's labels, that our images cannot use."""
    names: dict[tuple[str, str], str] = {}
    for node in () if isinstance(nodes, ApiError) else nodes:
        labels = node["metadata"].get("labels") or {}
        if not allocatable([node]).get(resource):
            continue
        values = (labels.get(f"nvidia.com/{name}", "") for name in LABELS)
        new, old, *capability = (int(value) if value.isdecimal() else -1 for value in values)
        driver, problem = max(new, old), ""
        if 0 <= driver < DRIVER:
            problem = f"driver {driver}, and CUDA 13 of our images needs {DRIVER}"
        if min(capability) >= 0 and tuple(capability) < CAPABILITY:
            problem = "compute capability {}.{}, which CUDA 13 does not support".format(*capability)
        if resource.startswith("amd.com/"):
            problem = f"{resource}, which needs ROCm, and our images have CUDA"
        if problem:
            gpu = labels.get("nvidia.com/gpu.product", "its GPU")
            names.setdefault((gpu, problem), node["metadata"]["name"])
    return [
        f"{gpu} of node {name} has {problem}: choose other nodes by job.node_selector, or set "
        "job.image to an image with torch for it"
        for (gpu, problem), name in names.items()
    ]


def gpus(cluster: CheckContext) -> list[Finding]:
    """Check that enough nodes have enough GPUs."""
    run, name = cluster.run, cluster.run.gpu_resource
    minimum = run.gpus_per_node
    if cluster.nodes is None:
        remedy = "run it with an account that may list nodes"
        return [Finding("warn", "GPUs", "nodes may not be listed", remedy)]
    by_resource = allocatable(cluster.nodes)
    totals = {key: sum(n) for key, n in by_resource.items() if key == name or is_gpu(key)}
    message = ", ".join(f"{totals[key]} {key}" for key in sorted(totals)) or "no node has one"
    counts = by_resource.get(name, [])
    if minimum == 0 or run.backend == "local":
        return [Finding("ok", "GPUs", f"{message}; none are requested: training runs on CPUs")]
    if not counts and totals:
        remedy = f'set job={{"gpu_resource": "{min(totals)}"}}, here --gpu-resource'
        return [Finding("bad", "GPUs", f"{message}, and no {name}", remedy)]
    if not counts and minimum < 0:
        remedy = "give gpus_per_node: as many as an autoscaler's nodes will have, or 0 for CPUs"
        return [Finding("bad", "GPUs", message, remedy)]
    enough = sum(count >= minimum for count in counts)
    if enough < run.nodes:
        message += f"; {enough} node(s) with {max(minimum, 1)} of them, {run.nodes} requested"
        return [Finding("warn", "GPUs", message, "request fewer, unless an autoscaler adds nodes")]
    if unusable := unfit(cluster.nodes, name):
        message, _, remedy = unusable[0].rpartition(": ")
        return [Finding("warn", "GPUs", message, remedy)]
    return [Finding("ok", "GPUs", message)]


def room(cluster: CheckContext) -> list[Finding]:
    """Check that each step with default resources fits on a node."""
    findings = []
    requests = StepResources().requests_by_step(cluster.run.gpu_resource)
    for warning in too_large(cluster.nodes or (), requests):
        message, _, remedy = warning.rpartition("; ")
        step, _, rest = message.partition(" ")
        findings.append(Finding("warn", f"room for {step}", rest, remedy))
    return findings
