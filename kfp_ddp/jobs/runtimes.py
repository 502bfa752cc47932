"""The runtime that a TrainJob is made from: one of its namespace, or else one of the cluster."""

from kfp_ddp.core.errors import InputError
from kfp_ddp.jobs.manifests.trainjob import CONTAINER, Runtime
from kfp_ddp.jobs.specification.kinds import KINDS
from kfp_ddp.jobs.specification.launch_spec import LaunchSpec
from kfp_ddp.k8s.api import Api, ApiError, Object, custom


def find_runtime(api: Api, spec: LaunchSpec) -> Runtime:
    """The runtime that a specification names; what may not be looked at counts as there.

    Raises:
        InputError: neither the namespace nor the cluster has one of that name.
    """
    version = KINDS[spec.kind].group_version
    space = _look(api, custom(version, api.namespace, "trainingruntimes", spec.runtime))
    if isinstance(space, dict):
        return Runtime("TrainingRuntime", _has_resources(space))
    whole = _look(api, f"/apis/{version}/clustertrainingruntimes/{spec.runtime}")
    if isinstance(whole, dict):
        return Runtime("ClusterTrainingRuntime", _has_resources(whole))
    if whole == 404 and space == 404:
        raise InputError(
            f"runtime {spec.runtime!r} does not exist; use one of "
            "`kubectl get trainingruntimes,clustertrainingruntimes`"
        )
    return Runtime("TrainingRuntime" if whole == 404 else "ClusterTrainingRuntime", True)


def _look(api: Api, path: str) -> Object | int:
    """The object, or the status of the refusal."""
    try:
        return api.call("GET", path, retry=True)
    except ApiError as error:
        return error.status


def _has_resources(runtime: Object) -> bool:
    """Whether it says what its nodes ask for, which our defaults are not to overrule."""
    jobs = runtime["spec"]["template"]["spec"].get("replicatedJobs") or []
    return any(
        container.get("resources")
        for job in jobs
        for container in job["template"]["spec"]["template"]["spec"]["containers"]
        if container["name"] == CONTAINER
    )
