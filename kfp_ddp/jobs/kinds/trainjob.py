"""TrainJob of Kubeflow Trainer v2, and its runtime."""

from __future__ import annotations

import sys

from kfp_ddp.core.errors import InputError
from kfp_ddp.jobs.fields import JobFields, Starter
from kfp_ddp.jobs.kinds import pod
from kfp_ddp.jobs.kinds.base import (
    UNBUFFERED,
    Kind,
    PodRole,
    Runtime,
    Unsupported,
)
from kfp_ddp.k8s.api import Api, ApiError, Object
from kfp_ddp.k8s.objects import list_of, missing_field, part, select
from kfp_ddp.k8s.resource import Resource

GROUP_VERSION = "trainer.kubeflow.org/v1alpha1"
RUNTIMES = {
    "TrainingRuntime": Resource(GROUP_VERSION, "trainingruntimes"),
    "ClusterTrainingRuntime": Resource(GROUP_VERSION, "clustertrainingruntimes", namespaced=False),
}
INDEX = "batch.kubernetes.io/job-completion-index"
REPLICA = "jobset.sigs.k8s.io/replicatedjob-name"
LAUNCHER = "launcher"
POLICIES: dict[str, Starter] = {"torch": "torchrun", "mpi": "mpirun"}
"""Starters by the policy of a runtime. Ranks of the others, jax and xgboost, are one for each pod
and find each other by variables of Trainer."""
MANAGER = "kfp-ddp/launcher"
# Mounting this path prevents that Kubernetes mounts a token there; a patch has no field for it.
TOKEN_DIR = "/var/run/secrets/kubernetes.io/serviceaccount"  # noqa: S105
EMPTY = "empty"
# The parts of the worker's pod that a patch has a field for.
PATCHED = (
    *("nodeSelector", "tolerations", "affinity", "securityContext", "serviceAccountName"),
    "imagePullSecrets",
)
# Trainer has it since 2.3. Kueue up to 0.19 has the types of 2.2, and removes it at admission.
NOT_IN_A_QUEUE = ("terminationGracePeriodSeconds",)
OF_THE_RUNTIME = (
    *("host_network", "init_containers", "topology_spread", "priority_class", "image_pull_policy"),
    *("restart_policy", "backoff_limit", "env_from_secrets", "clean_pod_policy", "ttl_seconds"),
    "runtime_class",
)
IN_THE_RUNTIME = (
    "{setting} cannot be set on a TrainJob: put it into the runtime {runtime!r}, "
    "or use a PyTorchJob"
)
IN_A_QUEUE = (
    "grace_seconds cannot be set on a TrainJob in a queue: put terminationGracePeriodSeconds into "
    "the runtime {runtime!r}, or use a PyTorchJob"
)


class TrainJob(Kind):
    """A TrainJob that patches its runtime with volumes, scheduling and security."""

    group_version = GROUP_VERSION
    operator = "Kubeflow Trainer 2.3 or later"
    operator_selector = "app.kubernetes.io/name=trainer"
    newest_field = (
        *("runtimePatches", "trainingRuntimeSpec", "template", "spec", "replicatedJobs"),
        *("template", "spec", "template", "spec", "terminationGracePeriodSeconds"),
    )
    job_label = "jobset.sigs.k8s.io/jobset-name"
    containers = ("node",)
    script_starter = "torchrun"
    unsupported = (
        Unsupported("scheduler", IN_THE_RUNTIME, allowed=("kueue",)),
        *(Unsupported(setting, IN_THE_RUNTIME) for setting in OF_THE_RUNTIME),
    )
    environment = UNBUFFERED
    restarts_in_place = True
    waits_silently = True
    rendezvous_port = 29500

    def manifest(
        self, spec: JobFields, metadata: Object, script_map: str, runtime: Runtime | None = None
    ) -> Object:
        """Return the TrainJob."""
        runtime = runtime or Runtime()
        starter = runtime.starter
        template = pod.template(spec, metadata["labels"], self.containers[0], script_map, starter)
        worker = template["spec"]["containers"][0]
        if starter == "mpirun":
            _send_variables(worker, spec)
        volumes = list(template["spec"].get("volumes", []))
        mounts = list(worker.get("volumeMounts", []))
        if not spec.service_account:
            volumes.append({"name": EMPTY, "emptyDir": {}})
            mounts.append({"name": EMPTY, "mountPath": TOKEN_DIR, "readOnly": True})
        # A patch has one mount of each volume: another one of a PVC gets a volume of its own.
        claims = {one["name"]: one for one in volumes if "persistentVolumeClaim" in one}
        mounted: set[str] = set()
        for number, mount in enumerate(mounts):
            if mount["name"] in mounted & claims.keys():
                name = f"{mount['name'][:58]}-{number}"
                volumes.append({**claims[mount["name"]], "name": name})
                mounts[number] = {**mount, "name": name}
            mounted.add(mount["name"])
        container = {**select(worker, ("name", "securityContext")), "volumeMounts": mounts}
        fields = PATCHED if spec.scheduler else PATCHED + NOT_IN_A_QUEUE
        pods = {"volumes": volumes, "containers": [container]}
        patch = {**template, "spec": {**select(template["spec"], fields), **pods}}
        replicated = [
            {"name": name, "template": {"spec": {"template": patch}}} for name in runtime.replicas
        ]
        patches: Object = {
            "manager": MANAGER,
            "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": replicated}}},
        }
        trainer = {
            **select(worker, ("image", "command", "args", "env")),
            "numNodes": spec.nodes,
            "numProcPerNode": spec.processes(),
        }
        if resources := pod.resources(spec, defaults=not runtime.has_resources):
            trainer["resourcesPerNode"] = resources
        body: Object = {
            "runtimeRef": {"name": spec.runtime, "kind": runtime.kind},
            "trainer": trainer,
            "runtimePatches": [patches],
        }
        if spec.deadline_minutes:
            body["activeDeadlineSeconds"] = spec.operator_deadline()
        kind = {"apiVersion": GROUP_VERSION, "kind": self.title}
        return {**kind, "metadata": metadata, "spec": body}

    def pod_role(self, pod: Object) -> PodRole | None:
        """Return the role of a pod by its labels; None for a pod of another kind of job."""
        labels = part(pod, "metadata", "labels")
        number = labels.get(INDEX)
        if number is None:
            return None
        role = labels.get(REPLICA, "node")
        order = int(number) if number.isdecimal() else sys.maxsize
        return PodRole(f"{role}-{number}", order, leads=role == LAUNCHER)

    def runs(self, job: Object) -> bool:
        """Return whether one of its Jobs has ready or succeeded pods: it has no such condition.

        Pods that wait for a node count as active, so that number says nothing.
        """
        jobs = list_of(part(job, "status"), "jobsStatus")
        return any(item.get("ready") or item.get("succeeded") for item in jobs)

    def lost(self, job: Object, sent: Object) -> str:
        """Return the error of a TrainJob whose queue removed a part of our patch; '' for none.

        JobSet refuses the template that Trainer makes of what is left, so no pod would start.
        """
        patches = job["spec"].get("runtimePatches", [])
        ours = [patch for patch in patches if patch["manager"] == MANAGER]
        field = missing_field(sent["spec"].get("runtimePatches"), ours, "runtimePatches")
        if not field:
            return ""
        return (
            f"has lost {field} and was deleted: Kueue before 0.17 removes runtimePatches at "
            "admission, and Kueue 0.17 to 0.19 what Trainer 2.2 does not know; set scheduler=kueue "
            "for a job without it, use a newer Kueue, or backend pytorchjob in this queue"
        )

    def check(self, spec: JobFields) -> None:
        """Raise ValueError for the first setting that a TrainJob does not support."""
        super().check(spec)
        if spec.scheduler and spec.grace_seconds != JobFields.model_fields["grace_seconds"].default:
            raise ValueError(IN_A_QUEUE.format(runtime=spec.runtime))

    def find_runtime(self, api: Api, spec: JobFields) -> Runtime:
        """Return the runtime of a job, InputError if neither namespace nor cluster has it.

        One that may not be read counts as existing; all but Trainer's own may have resources.
        """
        unread = []
        for kind, resource in RUNTIMES.items():
            try:
                if runtime := api.get(resource, spec.runtime, retry=True):
                    return self._runtime(kind, runtime, spec)
            except ApiError:
                unread.append(kind)
        if not unread:
            raise InputError(
                f"runtime {spec.runtime!r} does not exist; use one of "
                "`kubectl get trainingruntimes,clustertrainingruntimes`"
            )
        own = JobFields.model_fields["runtime"].default
        return Runtime(unread[-1], has_resources=spec.runtime != own)

    def _runtime(self, kind: str, runtime: Object, spec: JobFields) -> Runtime:
        """Return what a job must know of a runtime; InputError if its nodes have another image."""
        policy = part(runtime, "spec", "mlPolicy")
        starter: Starter = next((POLICIES[name] for name in POLICIES if name in policy), "")
        nodes: dict[str, Object] = {}
        for job in runtime["spec"]["template"]["spec"].get("replicatedJobs") or []:
            for container in job["template"]["spec"]["template"]["spec"]["containers"]:
                if container["name"] == self.containers[0]:
                    nodes[job["name"]] = container
        has_resources = any(node.get("resources") for node in nodes.values())
        if starter != "mpirun":
            return Runtime(kind, has_resources, starter)
        # Trainer gives image and command to the launcher alone.
        for name, node in nodes.items():
            if name != LAUNCHER and node.get("image") != spec.image:
                raise InputError(
                    f"runtime {spec.runtime!r} runs its {name}s with the image "
                    f"{node.get('image')}, which a TrainJob cannot replace: give image that one, "
                    "or make a runtime with yours"
                )
        return Runtime(kind, has_resources, starter, tuple(nodes))


def _send_variables(launcher: Object, spec: JobFields) -> None:
    """Let our mpirun give the launcher's variables to all ranks, which SSH starts without any."""
    if not spec.script and not spec.entry:
        return
    names = ["PATH", *(item["name"] for item in launcher["env"] if item["name"] != pod.NODE)]
    launcher["command"][1:1] = [word for name in names for word in ("-x", name)]
