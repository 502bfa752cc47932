"""The manifest of a specification, by the kind of its job."""

from kfp_ddp.jobs.manifests import training_operator, trainjob
from kfp_ddp.jobs.specification.launch_spec import LaunchSpec
from kfp_ddp.k8s.api import Object

WRITERS = {
    "pytorchjob": training_operator.pytorchjob,
    "trainjob": trainjob.manifest,
    "tfjob": training_operator.tfjob,
    "mpijob": training_operator.mpijob,
}


def job_manifest(
    spec: LaunchSpec,
    metadata: Object,
    script_map: str = "",
    runtime: trainjob.Runtime | None = None,
) -> Object:
    """The job as the API server takes it, with its name, namespace, labels and owner.

    `script_map` is the ConfigMap that holds the script, '' when it travels in the environment;
    `runtime` what a TrainJob is made from, where that is known.
    """
    if spec.kind == "trainjob":
        return trainjob.manifest(spec, metadata, script_map, runtime)
    return WRITERS[spec.kind](spec, metadata, script_map)
