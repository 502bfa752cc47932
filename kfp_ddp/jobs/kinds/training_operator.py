"""The kinds of jobs of the Training Operator (kubeflow.org/v1)."""

from __future__ import annotations

import copy
import sys
from abc import abstractmethod
from typing import Any

from kfp_ddp.jobs.fields import JobFields
from kfp_ddp.jobs.kinds import pod
from kfp_ddp.jobs.kinds.base import (
    NO_RUNTIME,
    ONE_PROCESS,
    UNBUFFERED,
    Kind,
    PodRole,
    Runtime,
    Unsupported,
)
from kfp_ddp.k8s.api import Object
from kfp_ddp.k8s.objects import part

JOB = "training.kubeflow.org/job-name"
TYPE = "training.kubeflow.org/replica-type"
INDEX = "training.kubeflow.org/replica-index"
LEADING = ("launcher", "master", "chief")
INDEX_FIELD = {"fieldRef": {"fieldPath": f"metadata.labels['{INDEX}']"}}
# A worker of an MPIJob waits until mpirun starts ranks in it by `kubectl exec`. The operator's own
# `sleep 365d` ignores SIGTERM as process 1, and would occupy its GPUs for the full grace period.
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


class TrainingOperatorKind(Kind):
    """A kind of job of the Training Operator."""

    group_version = "kubeflow.org/v1"
    operator = "Kubeflow Training Operator 1.9"
    operator_selector = "control-plane=kubeflow-training-operator"
    job_label = JOB

    def pod_role(self, pod: Object) -> PodRole | None:
        """Return the role of a pod by its labels; None for a pod of another kind of job."""
        labels = pod["metadata"].get("labels") or {}
        if TYPE not in labels:
            return None
        number = str(labels.get(INDEX, ""))
        return PodRole(
            f"{labels[TYPE]}-{number or 0}",
            int(number) if number.isdecimal() else sys.maxsize,
            labels[TYPE] in LEADING,
        )

    def suspended(self, job: Object) -> bool:
        """Return whether the job's spec suspends it, as a queue does."""
        return bool(part(job, "spec", "runPolicy").get("suspend"))

    def manifest(
        self, spec: JobFields, metadata: Object, script_map: str, runtime: Runtime | None = None
    ) -> Object:
        """Return the job as JSON, by the models of kubeflow-training."""
        from kubeflow import training

        template = pod.template(spec, metadata["labels"], self.containers[0], script_map)
        fields = self.fields(spec, metadata["name"], template)
        model = f"KubeflowOrgV1{self.title}"
        body = getattr(training, f"{model}Spec")(**fields, run_policy=_run_policy(spec))
        job = getattr(training, model)(
            api_version=self.group_version, kind=self.title, metadata=metadata, spec=body
        )
        manifest: Object = training.ApiClient().sanitize_for_serialization(job)
        return manifest

    @abstractmethod
    def fields(self, spec: JobFields, name: str, template: Object) -> dict[str, Any]:
        """Return the fields of the job's spec without its run policy, by the names of the model."""


class PyTorchJob(TrainingOperatorKind):
    """A PyTorchJob of workers only; the rendezvous is at the first one.

    With a master, the operator adds an init container to the workers that gives up after 200 s,
    less than pulling an image may take, and that PodSecurity `restricted` refuses.
    """

    newest_field = ("runPolicy", "managedBy")
    containers = ("pytorch",)
    script_starter = "torchrun"
    unsupported = (NO_RUNTIME,)
    waits_silently = True
    rendezvous_port = 23456

    def fields(self, spec: JobFields, name: str, template: Object) -> dict[str, Any]:
        """Return the fields of a PyTorchJobSpec."""
        container = template["spec"]["containers"][0]
        variables = {item["name"]: item for item in container.get("env", [])}
        variables |= _rendezvous(spec, f"{name}-worker-0")
        container["env"] = list(variables.values())
        return {
            "pytorch_replica_specs": {"Worker": _replica(spec, spec.nodes, template)},
            "nproc_per_node": str(spec.processes()),
        }


class TFJob(TrainingOperatorKind):
    """A TFJob of a chief and workers, as MultiWorkerMirroredStrategy expects.

    The operator gives each pod its place in the cluster as TF_CONFIG.
    """

    containers = ("tensorflow",)
    script_starter = ""
    unsupported = (
        NO_RUNTIME,
        ONE_PROCESS,
        Unsupported(
            "nccl_timeout_minutes",
            "nccl_timeout_minutes={value}: this is a time limit of torch, which a {kind} does not "
            "run; leave it at 0",
        ),
    )
    environment = UNBUFFERED
    rendezvous_port = 2222
    replicas = "tf_replica_specs"
    """Field of the spec."""
    first = "Chief"
    """Role of the first pod."""

    def fields(self, spec: JobFields, name: str, template: Object) -> dict[str, Any]:
        """Return the fields of the job's spec."""
        replicas = {self.first: _replica(spec, 1, template)}
        if spec.nodes > 1:
            replicas["Worker"] = _replica(spec, spec.nodes - 1, template)
        return {self.replicas: replicas}


class XGBoostJob(TFJob):
    """An XGBoostJob of a master, where XGBoost's tracker is to run, and workers."""

    containers = ("xgboost",)
    rendezvous_port = 9999
    replicas = "xgb_replica_specs"
    first = "Master"


class MPIJob(TrainingOperatorKind):
    """An MPIJob: the command runs in the launcher, which starts the ranks in the workers.

    The launcher has no GPU; it is one pod besides the `nodes` workers.
    """

    containers = ("mpi",)
    script_starter = "mpirun"
    unsupported = (NO_RUNTIME,)
    environment = UNBUFFERED
    extra_pods = 1

    def fields(self, spec: JobFields, name: str, template: Object) -> dict[str, Any]:
        """Return the fields of an MPIJobSpec."""
        worker = template
        launcher = copy.deepcopy(template)
        worker["spec"]["containers"][0]["command"] = WAIT
        worker["spec"]["containers"][0].pop("args", None)
        launcher["spec"]["containers"][0]["resources"] = LAUNCHER_RESOURCES
        launcher["spec"].pop("automountServiceAccountToken", None)  # it needs the API for exec
        if "command" in launcher["spec"]["containers"][0]:
            first = ["sh", "-c", WHEN_WORKERS_RUN, f"{JOB}={name},{TYPE}=worker"]
            launcher["spec"]["containers"][0]["command"][:0] = first
        return {
            "mpi_replica_specs": {
                "Launcher": _replica(spec, 1, launcher),
                "Worker": _replica(spec, spec.nodes, worker),
            },
            "slots_per_worker": spec.processes(),
            "clean_pod_policy": spec.clean_pod_policy,
        }

    def check(self, spec: JobFields) -> None:
        """Raise ValueError for the first setting that this kind does not support."""
        super().check(spec)
        if spec.prepares() and spec.command:
            raise ValueError(
                "code and packages_to_install reach the ranks of an mpijob by a script or an "
                "entry: its command runs only in the launcher"
            )


def _replica(spec: JobFields, count: int, template: Object) -> Any:
    from kubeflow.training import KubeflowOrgV1ReplicaSpec

    return KubeflowOrgV1ReplicaSpec(
        replicas=count, restart_policy=spec.restart_policy, template=template
    )


def _rendezvous(spec: JobFields, first: str) -> dict[str, Object]:
    """Return the variables that the operator sets where there is a master.

    With the two of a rank's place in its pod, which torchrun replaces, a plain command is a rank.
    """
    port = str(PyTorchJob.rendezvous_port)
    fixed = {
        "MASTER_ADDR": first,
        "MASTER_PORT": port,
        "PET_MASTER_ADDR": first,
        "PET_MASTER_PORT": port,
        "WORLD_SIZE": str(spec.nodes * spec.processes()),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": str(spec.processes()),
    }
    variables: dict[str, Object] = {name: {"name": name, "value": fixed[name]} for name in fixed}
    ranks = ("RANK", "PET_NODE_RANK")
    return variables | {name: {"name": name, "valueFrom": INDEX_FIELD} for name in ranks}


def _run_policy(spec: JobFields) -> Any:
    """Return the RunPolicy: clean-up, time to live, deadline and gang."""
    from kubeflow.training import KubeflowOrgV1RunPolicy, KubeflowOrgV1SchedulingPolicy

    scheduling = None
    if spec.scheduler in ("volcano", "coscheduling"):
        # Without min_available the gang is all pods, which in an MPIJob are one more than nodes.
        scheduling = KubeflowOrgV1SchedulingPolicy(
            queue=spec.queue or None, priority_class=spec.priority_class or None
        )
    return KubeflowOrgV1RunPolicy(
        clean_pod_policy=spec.clean_pod_policy,
        ttl_seconds_after_finished=spec.ttl_seconds if spec.ttl_seconds >= 0 else None,
        active_deadline_seconds=spec.operator_deadline(),
        backoff_limit=spec.backoff_limit if spec.backoff_limit >= 0 else None,
        scheduling_policy=scheduling,
    )
