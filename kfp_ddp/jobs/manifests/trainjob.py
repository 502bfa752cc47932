"""The TrainJob of a specification, for Trainer v2."""

from typing import NamedTuple

from kfp_ddp.jobs.manifests import pod
from kfp_ddp.jobs.specification.kinds import PATCHES_MANAGER
from kfp_ddp.jobs.specification.launch_spec import LaunchSpec
from kfp_ddp.k8s.api import Object

CONTAINER = "node"
# A mount at this path keeps Kubernetes from mounting the token, for which a patch has no field.
TOKEN_DIR = "/var/run/secrets/kubernetes.io/serviceaccount"  # noqa: S105
EMPTY = "empty"


class Runtime(NamedTuple):
    """What a TrainJob is made from."""

    kind: str = "ClusterTrainingRuntime"
    has_resources: bool = False
    """Whether it says itself what a node asks for, so that defaults would overrule it."""


def manifest(
    spec: LaunchSpec, metadata: Object, script_map: str = "", runtime: Runtime | None = None
) -> Object:
    """A TrainJob that patches its runtime with volumes, scheduling and security."""
    from kubeflow_trainer_api import models

    runtime = runtime or Runtime()
    template = pod.template(spec, metadata["labels"], CONTAINER, script_map)
    volumes, mounts = pod.volumes(spec, script_map), pod.mounts(spec, script_map)
    if not spec.service_account:
        volumes.append({"name": EMPTY, "emptyDir": {}})
        mounts.append({"name": EMPTY, "mountPath": TOKEN_DIR, "readOnly": True})
    resources = pod.resources(spec, defaults=not runtime.has_resources)
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
                    "name": CONTAINER,
                    "volumeMounts": mounts,
                    "securityContext": pod.container_security(spec),
                }
            ],
        },
    }
    replicated = {"name": CONTAINER, "template": {"spec": {"template": patch}}}
    job = models.TrainerV1alpha1TrainJob.from_dict(
        {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
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
                    "resourcesPerNode": _as_strings(resources) or None,
                },
                "runtimePatches": [
                    {
                        "manager": PATCHES_MANAGER,
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


def _as_strings(resources: Object) -> Object:
    """Quantities as strings, which the models take through from_dict."""
    return {kind: {k: str(v) for k, v in values.items()} for kind, values in resources.items()}


def _without_empty(value: Object) -> Object:
    """Without empty parts, which the server would store as they are."""
    found = {}
    for key, item in value.items():
        if isinstance(item, dict):
            item = _without_empty(item)
        elif isinstance(item, list):
            item = [_without_empty(each) if isinstance(each, dict) else each for each in item]
        if item is not None and item != {} and item != []:
            found[key] = item
    return found
