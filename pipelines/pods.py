"""What the pods of a pipeline's steps ask of the cluster."""

from collections.abc import Mapping
from typing import Any

from kfp import dsl, kubernetes
from kfp.dsl.pipeline_channel import PipelineChannel

# A PodDisruptionBudget in deploy/eviction selects by the label.
KEPT = ("kfp-ddp/evict", "false")
NOT_TO_EVICT = (
    ("cluster-autoscaler.kubernetes.io/safe-to-evict", "false"),
    ("karpenter.sh/do-not-disrupt", "true"),
)


def waiting(task: dsl.PipelineTask) -> dsl.PipelineTask:
    """A step that asks, writes a little, and is soon over."""
    task.set_cpu_request("100m").set_cpu_limit("1")
    return task.set_memory_request("256Mi").set_memory_limit("1Gi")


def working(
    task: dsl.PipelineTask,
    asks: Mapping[str, str],
    cpu: Any,
    memory: Any,
    gpus: Any = None,
    gpu_resource: Any = None,
) -> dsl.PipelineTask:
    """A step that asks for something and may use what an earlier step has told."""
    given = (cpu, memory, gpus, gpu_resource)
    channels = [each for each in given if isinstance(each, PipelineChannel)]
    task.register_pipeline_channels(channels)  # or groups around the task do not hand them on
    task.set_cpu_request(asks["cpu"]).set_cpu_limit(cpu)
    task.set_memory_request(asks["memory"]).set_memory_limit(memory)
    if gpus is not None:
        task.set_accelerator_type(gpu_resource).set_accelerator_limit(gpus)
    return task


def kept(task: dsl.PipelineTask) -> dsl.PipelineTask:
    """A step that runs for hours: whoever drains or packs nodes is asked to wait for it."""
    for key, value in NOT_TO_EVICT:
        kubernetes.add_pod_annotation(task, key, value)
    return kubernetes.add_pod_label(task, *KEPT)
