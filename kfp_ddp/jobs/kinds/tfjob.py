"""TFJob of the Training Operator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kfp_ddp.jobs.kinds.base import NO_RUNTIME, NOT_ELASTIC, UNBUFFERED, Unsupported
from kfp_ddp.jobs.kinds.training_operator import TrainingOperatorKind, replica
from kfp_ddp.k8s.api import Object

if TYPE_CHECKING:
    from kfp_ddp.jobs.launch_spec import LaunchSpec


class TFJob(TrainingOperatorKind):
    """A TFJob of a chief and workers, as MultiWorkerMirroredStrategy expects.

    The operator gives each pod its place in the cluster as TF_CONFIG.
    """

    name = "tfjob"
    title = "TFJob"
    plural = "tfjobs"
    containers = ("tensorflow",)
    script_starter = ""
    unsupported = (
        NOT_ELASTIC,
        NO_RUNTIME,
        Unsupported(
            "nproc_per_node",
            "nproc_per_node={value}: a {kind} runs one process in each pod; leave it at 0",
        ),
        Unsupported(
            "nccl_timeout_minutes",
            "nccl_timeout_minutes={value}: this is a time limit of torch, which a {kind} does not "
            "run; leave it at 0",
        ),
    )
    environment = UNBUFFERED

    def fields(self, spec: LaunchSpec, name: str, template: Object) -> dict[str, Any]:
        """Return the fields of a TFJobSpec."""
        replicas = {"Chief": replica(spec, 1, template)}
        if spec.nodes > 1:
            replicas["Worker"] = replica(spec, spec.nodes - 1, template)
        return {"tf_replica_specs": replicas}


KIND = TFJob()
