"""PyTorchJob of the Training Operator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kfp_ddp.jobs.kinds.base import NO_RUNTIME, RENDEZVOUS
from kfp_ddp.jobs.kinds.training_operator import INDEX, TrainingOperatorKind, replica
from kfp_ddp.k8s.api import Object

if TYPE_CHECKING:
    from kfp_ddp.jobs.launch_spec import LaunchSpec

# The port of the rendezvous, which the operator gives the pods' Services.
PORT = "23456"
# A pod's name resolves while the pod runs. Process 1 gets SIGTERM only if it traps it.
WHEN_FIRST_RUNS = """trap exit TERM
[ "$INDEX" = 0 ] || ! command -v getent || until getent hosts "$0"; do sleep 2; done
"""
WAIT_RESOURCES = {part: {"cpu": "100m", "memory": "64Mi"} for part in ("limits", "requests")}
INDEX_FIELD = {"fieldRef": {"fieldPath": f"metadata.labels['{INDEX}']"}}


class PyTorchJob(TrainingOperatorKind):
    """A PyTorchJob of workers only; the rendezvous is at the first one.

    With a master, the operator adds an init container to the workers that gives up after 200 s,
    less than pulling an image may take, and that PodSecurity `restricted` refuses.
    """

    name = "pytorchjob"
    title = "PyTorchJob"
    plural = "pytorchjobs"
    newest_field = ("runPolicy", "managedBy")
    containers = ("pytorch",)
    script_starter = "torchrun"
    unsupported = (NO_RUNTIME,)
    environment = RENDEZVOUS
    waits_silently = True

    def fields(self, spec: LaunchSpec, name: str, template: Object) -> dict[str, Any]:
        """Return the fields of a PyTorchJobSpec."""
        from kubeflow.training import KubeflowOrgV1ElasticPolicy

        first, elastic = f"{name}-worker-0", None
        container = template["spec"]["containers"][0]
        if spec.elastic:
            low, high = spec.node_range()
            elastic = KubeflowOrgV1ElasticPolicy(
                min_replicas=low,
                max_replicas=high,
                rdzv_backend="c10d",
                max_restarts=spec.restarts(),
                rdzv_id=name,
            )
            # torchrun's limit for this wait is a minute, and it has no setting.
            init = template["spec"].setdefault("initContainers", [])
            init.append(_wait_for(first, container))
        else:
            variables = {item["name"]: item for item in container.get("env", [])}
            container["env"] = list((variables | _rendezvous(spec, first)).values())
        return {
            "pytorch_replica_specs": {"Worker": replica(spec, spec.pods(), template)},
            "elastic_policy": elastic,
            "nproc_per_node": str(spec.processes()),
        }


def _rendezvous(spec: LaunchSpec, first: str) -> dict[str, Object]:
    """Return the variables that the operator sets where there is a master."""
    fixed = {
        "MASTER_ADDR": first,
        "MASTER_PORT": PORT,
        "PET_MASTER_ADDR": first,
        "PET_MASTER_PORT": PORT,
        "WORLD_SIZE": str(spec.nodes * spec.processes()),
    }
    variables: dict[str, Object] = {name: {"name": name, "value": fixed[name]} for name in fixed}
    ranks = ("RANK", "PET_NODE_RANK")
    return variables | {name: {"name": name, "valueFrom": INDEX_FIELD} for name in ranks}


def _wait_for(first: str, container: Object) -> Object:
    """Return an init container that ends when the first worker runs."""
    return {
        "name": "wait-for-first",
        "image": container["image"],
        "command": ["sh", "-c", WHEN_FIRST_RUNS, first],
        "env": [{"name": "INDEX", "valueFrom": INDEX_FIELD}],
        "resources": WAIT_RESOURCES,
        "securityContext": container["securityContext"],
    }


KIND = PyTorchJob()
