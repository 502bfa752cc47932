"""TrainJob of Kubeflow Trainer v2, and its runtime."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from kfp_ddp.core.errors import InputError
from kfp_ddp.jobs.kinds import pod
from kfp_ddp.jobs.kinds.base import (
    NOT_ELASTIC,
    RENDEZVOUS,
    UNBUFFERED,
    Kind,
    PodRole,
    Runtime,
    Unsupported,
)
from kfp_ddp.k8s.api import Api, ApiError, Object, custom

if TYPE_CHECKING:
    from kfp_ddp.jobs.launch_spec import LaunchSpec

INDEX = "batch.kubernetes.io/job-completion-index"
MANAGER = "kfp-ddp/launcher"
# Mounting this path prevents that Kubernetes mounts a token there; a patch has no field for it.
TOKEN_DIR = "/var/run/secrets/kubernetes.io/serviceaccount"  # noqa: S105
EMPTY = "empty"
IN_THE_RUNTIME = (
    "{setting} cannot be set on a TrainJob: put it into the runtime {runtime!r}, "
    "or use a PyTorchJob"
)


class TrainJob(Kind):
    """A TrainJob that patches its runtime with volumes, scheduling and security."""

    name = "trainjob"
    title = "TrainJob"
    group_version = "trainer.kubeflow.org/v1alpha1"
    plural = "trainjobs"
    operator = "Kubeflow Trainer 2.2 or later"
    operator_selector = "app.kubernetes.io/name=trainer"
    newest_field = ("runtimePatches",)
    job_label = "jobset.sigs.k8s.io/jobset-name"
    containers = ("node",)
    script_starter = "torchrun"
    unsupported = (
        NOT_ELASTIC,
        Unsupported("host_network", IN_THE_RUNTIME),
        Unsupported("init_containers", IN_THE_RUNTIME),
        Unsupported("topology_spread", IN_THE_RUNTIME),
        Unsupported("priority_class", IN_THE_RUNTIME),
        Unsupported("image_pull_policy", IN_THE_RUNTIME),
        Unsupported("restart_policy", IN_THE_RUNTIME),
        Unsupported("backoff_limit", IN_THE_RUNTIME),
        Unsupported("scheduler", IN_THE_RUNTIME, allowed=("kueue",)),
        Unsupported("env_from_secrets", IN_THE_RUNTIME),
        Unsupported("clean_pod_policy", IN_THE_RUNTIME),
        Unsupported("ttl_seconds", IN_THE_RUNTIME),
    )
    environment: ClassVar[Mapping[str, str]] = {**UNBUFFERED, **RENDEZVOUS}
    restarts_in_place = True
    waits_silently = True

    def manifest(
        self,
        spec: LaunchSpec,
        metadata: Object,
        script_map: str = "",
        runtime: Runtime | None = None,
    ) -> Object:
        """Return the TrainJob."""
        from kubeflow_trainer_api import models

        runtime = runtime or Runtime()
        container = self.containers[0]
        template = pod.template(spec, metadata["labels"], container, script_map)
        volumes, mounts = pod.volumes(spec, script_map), pod.mounts(spec, script_map)
        if not spec.service_account:
            volumes.append({"name": EMPTY, "emptyDir": {}})
            mounts.append({"name": EMPTY, "mountPath": TOKEN_DIR, "readOnly": True})
        resources = {  # as strings, which from_dict of the models requires
            part: {name: str(value) for name, value in values.items()}
            for part, values in pod.resources(spec, defaults=not runtime.has_resources).items()
        }
        patch = {
            "metadata": template["metadata"],
            "spec": {
                **pod.scheduling(spec),
                "volumes": volumes,
                "securityContext": pod.security(spec),
                "serviceAccountName": spec.service_account or None,
                "imagePullSecrets": [{"name": name} for name in spec.image_pull_secrets],
                "terminationGracePeriodSeconds": spec.grace_seconds,
                "containers": [
                    {
                        "name": container,
                        "volumeMounts": mounts,
                        "securityContext": pod.container_security(spec),
                    }
                ],
            },
        }
        replicated = {"name": container, "template": {"spec": {"template": patch}}}
        job = models.TrainerV1alpha1TrainJob.from_dict(
            {
                "apiVersion": self.group_version,
                "kind": self.title,
                "metadata": metadata,
                "spec": {
                    "runtimeRef": {"name": spec.runtime, "kind": runtime.kind},
                    "trainer": {
                        "image": spec.image,
                        "command": pod.command(spec, script_map) or None,
                        "args": pod.args(spec) or None,
                        "env": pod.environment(spec, script_map) or None,
                        "numNodes": spec.nodes,
                        "numProcPerNode": spec.processes(),
                        "resourcesPerNode": resources or None,
                    },
                    "runtimePatches": [
                        {
                            "manager": MANAGER,
                            "trainingRuntimeSpec": {
                                "template": {"spec": {"replicatedJobs": [replicated]}}
                            },
                        }
                    ],
                    "activeDeadlineSeconds": spec.operator_deadline(),
                },
            }
        )
        return _without_empty(job.to_dict())

    def pod_role(self, pod: Object) -> PodRole | None:
        """Return the role of a pod by its labels; None for a pod of another kind of job."""
        number = (pod["metadata"].get("labels") or {}).get(INDEX)
        if number is None:
            return None
        return PodRole(f"node-{number}", int(number) if number.isdecimal() else sys.maxsize)

    def runs(self, job: Object) -> bool:
        """Return whether one of its Jobs has ready or succeeded pods: it has no such condition.

        Pods that wait for a node count as active, so that number says nothing.
        """
        jobs = (job.get("status") or {}).get("jobsStatus") or []
        return any(item.get("ready") or item.get("succeeded") for item in jobs)

    def suspended(self, job: Object) -> bool:
        """Return whether the job's spec suspends it, as a queue does."""
        return bool((job.get("spec") or {}).get("suspend"))

    def lost(self, job: Object) -> str:
        """Return the error of a TrainJob that has lost our patches; '' while it has them.

        When Kueue before 0.17 admits a TrainJob, it writes it back as Trainer 2.0 knew it, without
        runtimePatches. Trainer cannot create the pods after that.
        """
        patches = job["spec"].get("runtimePatches") or []
        if any(patch["manager"] == MANAGER for patch in patches):
            return ""
        return (
            "has lost its runtimePatches, with volumes and settings, and was deleted; Kueue before "
            "0.17 removes them: use a newer one, or backend pytorchjob in this queue"
        )

    def find_runtime(self, api: Api, spec: LaunchSpec) -> Runtime:
        """Return the runtime of a job; one that this account may not read counts as existing.

        Raises:
            InputError: neither the namespace nor the cluster has a runtime of that name.
        """
        path = custom(self.group_version, api.namespace, "trainingruntimes", spec.runtime)
        local = _get(api, path)
        if isinstance(local, dict):
            return Runtime("TrainingRuntime", self._has_resources(local))
        shared = _get(api, f"/apis/{self.group_version}/clustertrainingruntimes/{spec.runtime}")
        if isinstance(shared, dict):
            return Runtime("ClusterTrainingRuntime", self._has_resources(shared))
        if shared == 404 and local == 404:
            raise InputError(
                f"runtime {spec.runtime!r} does not exist; use one of "
                "`kubectl get trainingruntimes,clustertrainingruntimes`"
            )
        return Runtime("TrainingRuntime" if shared == 404 else "ClusterTrainingRuntime", True)

    def _has_resources(self, runtime: Object) -> bool:
        """Return whether a runtime sets the resources of its nodes."""
        jobs = runtime["spec"]["template"]["spec"].get("replicatedJobs") or []
        return any(
            container.get("resources")
            for job in jobs
            for container in job["template"]["spec"]["template"]["spec"]["containers"]
            if container["name"] == self.containers[0]
        )


def _without_empty(value: Object) -> Object:
    """Return an object without its empty parts, which the server would store."""
    parts = {}
    for key, item in value.items():
        if isinstance(item, dict):
            item = _without_empty(item)
        elif isinstance(item, list):
            item = [_without_empty(part) if isinstance(part, dict) else part for part in item]
        if item is not None and item != {} and item != []:
            parts[key] = item
    return parts


def _get(api: Api, path: str) -> Object | int:
    """Return the object, or the status of the refusal."""
    try:
        return api.call("GET", path, retry=True)
    except ApiError as error:
        return error.status


KIND = TrainJob()
