"""What a namespace holds besides steps' pods: jobs, their pods and services, claims, snapshots."""

from kfp_ddp.jobs.kinds import KINDS
from kfp_ddp.k8s.api import Api, core, custom
from tests.e2e.harness.grounds import Grounds

_CUSTOM = {
    **{kind.plural: kind.group_version for kind in KINDS.values()},
    "jobs": "batch/v1",
    "jobsets": "jobset.x-k8s.io/v1alpha2",
    "volumesnapshots": "snapshot.storage.k8s.io/v1",
}
_MADE_BY_KUBERNETES = "configmaps/kube-root-ca.crt"


def claims(grounds: Grounds) -> set[str]:
    """Return the names of all claims."""
    result = grounds.core.list_namespaced_persistent_volume_claim(grounds.namespace).items
    return {claim.metadata.name for claim in result}


def leftovers(grounds: Grounds) -> set[str]:
    """Return `kind/name` of all that a run can leave behind, but for steps' pods and claims."""
    api, space = Api(grounds.api, grounds.namespace), grounds.namespace
    paths = {name: core(space, name) for name in ("services", "configmaps", "secrets")}
    paths |= {name: custom(version, space, name) for name, version in _CUSTOM.items()}
    result = {
        f"pods/{pod.metadata.name}"
        for pod in grounds.core.list_namespaced_pod(space).items
        if not {"harness", "workflows.argoproj.io/workflow"} & set(pod.metadata.labels or {})
    }
    for plural, path in paths.items():
        items = api.call("GET", path)["items"]
        result |= {f"{plural}/{item['metadata']['name']}" for item in items}
    return result - {_MADE_BY_KUBERNETES}
