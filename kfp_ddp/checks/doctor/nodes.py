"""What the nodes have, against what the pods of a run ask for."""

from collections.abc import Sequence

from kfp_ddp.checks.doctor.finding import Asked, Finding
from kfp_ddp.checks.preflight.nodes import no_room
from kfp_ddp.checks.preflight.parameters import StepResources
from kfp_ddp.jobs.launch_spec import is_gpu
from kfp_ddp.k8s import nodes as cluster
from kfp_ddp.k8s.api import Object


def gpus(asked: Asked, nodes: Sequence[Object] | None) -> Finding:
    """Whether so many nodes have so many; what is left open is what they have."""
    wanted, name = asked.gpus_per_node, asked.gpu_resource
    if nodes is None:
        return Finding("warn", "GPUs", "nodes may not be listed", "run it as somebody who may")
    every = cluster.gpus(nodes)
    there = {each: counts for each, counts in every.items() if each == name or is_gpu(each)}
    said = ", ".join(f"{sum(there[each])} {each}" for each in sorted(there)) or "no node has one"
    counts = there.get(name, [])
    if wanted == 0 or asked.backend == "local":
        return Finding("ok", "GPUs", f"{said}; none are asked for: training runs on CPUs")
    if not counts and there:
        remedy = f'set job={{"gpu_resource": "{min(there)}"}}, here --gpu-resource'
        return Finding("bad", "GPUs", f"{said}, and no {name}", remedy)
    if not counts and wanted < 0:
        remedy = "give gpus_per_node: as many as an autoscaler's nodes will have, or 0 for CPUs"
        return Finding("bad", "GPUs", said, remedy)
    enough = sum(count >= wanted for count in counts)
    if enough < asked.nodes:
        said += f"; {enough} node(s) with {max(wanted, 1)} of them, {asked.nodes} asked for"
        return Finding("warn", "GPUs", said, "ask for fewer, unless nodes are added by themselves")
    return Finding("ok", "GPUs", said)


def room(asked: Asked, nodes: Sequence[Object] | None) -> list[Finding]:
    """The steps that are larger than every node, as they are unless `job` sets less."""
    found = []
    for warning in no_room(nodes or (), StepResources().by_step(asked.gpu_resource)):
        said, _, remedy = warning.rpartition("; ")
        step, _, what = said.partition(" ")
        found.append(Finding("warn", f"room for {step}", what, remedy))
    return found
