"""MPIJob of the Training Operator."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from kfp_ddp.jobs.kinds.base import NO_RUNTIME, NOT_ELASTIC, UNBUFFERED
from kfp_ddp.jobs.kinds.training_operator import JOB, TYPE, TrainingOperatorKind, replica
from kfp_ddp.k8s.api import Object

if TYPE_CHECKING:
    from kfp_ddp.jobs.launch_spec import LaunchSpec

# A worker waits until mpirun starts ranks in it by `kubectl exec`. The operator's own `sleep 365d`
# ignores SIGTERM as process 1, and would occupy its GPUs for the full grace period at the end.
WAIT = ["sh", "-c", "trap exit TERM; while :; do sleep 3600 & wait $!; done"]
# The operator starts the launcher beside the workers, and mpirun fails if one is not ready.
# The operator's init container leaves kubectl here, and its Role lets the launcher watch pods.
WHEN_WORKERS_RUN = """/opt/kube/kubectl wait pod --for=condition=Ready --timeout=-1s -l "$0" >&2 &&
exec "$@"
"""
# The launcher starts the ranks and computes nothing.
LAUNCHER_RESOURCES: Object = {
    "limits": {"cpu": "1", "memory": "2Gi"},
    "requests": {"cpu": "100m", "memory": "256Mi"},
}


class MPIJob(TrainingOperatorKind):
    """An MPIJob: the command runs in the launcher, which starts the ranks in the workers.

    The launcher has no GPU; it is one pod besides the `nodes` workers.
    """

    name = "mpijob"
    title = "MPIJob"
    plural = "mpijobs"
    containers = ("mpi",)
    script_starter = "mpirun"
    unsupported = (NOT_ELASTIC, NO_RUNTIME)
    # By default Open MPI binds each of two ranks to one core, too few for a rank with threads.
    environment: ClassVar[Mapping[str, str]] = {
        **UNBUFFERED,
        "OMPI_MCA_hwloc_base_binding_policy": "none",
    }
    extra_pods = 1

    def fields(self, spec: LaunchSpec, name: str, template: Object) -> dict[str, Any]:
        """Return the fields of an MPIJobSpec."""
        worker, launcher = template, copy.deepcopy(template)
        worker["spec"]["containers"][0]["command"] = WAIT
        worker["spec"]["containers"][0].pop("args", None)
        launcher["spec"]["containers"][0]["resources"] = LAUNCHER_RESOURCES
        launcher["spec"].pop("automountServiceAccountToken", None)  # it needs the API for exec
        if "command" in launcher["spec"]["containers"][0]:
            first = ["sh", "-c", WHEN_WORKERS_RUN, f"{JOB}={name},{TYPE}=worker"]
            launcher["spec"]["containers"][0]["command"][:0] = first
        return {
            "mpi_replica_specs": {
                "Launcher": replica(spec, 1, launcher),
                "Worker": replica(spec, spec.nodes, worker),
            },
            "slots_per_worker": spec.processes(),
            "clean_pod_policy": spec.clean_pod_policy,
        }

    def check(self, spec: LaunchSpec) -> None:
        """Check that this kind supports the settings.

        Raises:
            ValueError: naming the first that it does not support.
        """
        super().check(spec)
        if spec.prepares() and spec.command:
            raise ValueError(
                "code and packages_to_install reach the ranks of an mpijob by a script or an "
                "entry: its command runs only in the launcher"
            )


KIND = MPIJob()
