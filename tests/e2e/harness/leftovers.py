"""What a namespace holds besides steps' pods: jobs, their pods and services, claims, snapshots."""

from kfp_ddp.jobs.kinds import KINDS
from kfp_ddp.k8s.api import Api, unless
from kfp_ddp.k8s.resource import CONFIG_MAPS, JOBS, Resource
from tests.e2e.harness.grounds import Grounds

_RESOURCES = (
    *(kind.resource for kind in KINDS.values()),
    CONFIG_MAPS,
    Resource("v1", "services"),
    Resource("v1", "secrets"),
    JOBS,
    Resource("jobset.x-k8s.io/v1alpha2", "jobsets"),
    Resource("snapshot.storage.k8s.io/v1", "volumesnapshots"),
)
_MADE_BY_KUBERNETES = "configmaps/kube-root-ca.crt"


def claims(grounds: Grounds) -> set[str]:
    """Return the names of all claims."""
    result = grounds.core.list_namespaced_persistent_volume_claim(grounds.namespace).items
    return {claim.metadata.name for claim in result}


def leftovers(grounds: Grounds) -> set[str]:
    """Return `kind/name` of all that a run can leave behind, but for steps' pods and claims."""
    api, space = Api(grounds.api, grounds.namespace), grounds.namespace
    result = {
        f"pods/{pod.metadata.name}"
        for pod in grounds.core.list_namespaced_pod(space).items
        if not {"harness", "workflows.argoproj.io/workflow"} & set(pod.metadata.labels or {})
    }
    for resource in _RESOURCES:
        with unless(404):  # the cluster may lack the operator of a kind
            items = api.list_objects(resource)
            result |= {f"{resource.plural}/{item['metadata']['name']}" for item in items}
    return result - {_MADE_BY_KUBERNETES}
