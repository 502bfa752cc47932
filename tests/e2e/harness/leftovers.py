"""What a namespace holds besides steps' pods: jobs, their pods and services, claims, snapshots."""

from kubernetes import client

from tests.e2e.harness.grounds import Grounds

_CUSTOM = (
    ("kubeflow.org", "v1", "pytorchjobs"),
    ("kubeflow.org", "v1", "tfjobs"),
    ("kubeflow.org", "v1", "mpijobs"),
    ("trainer.kubeflow.org", "v1alpha1", "trainjobs"),
    ("jobset.x-k8s.io", "v1alpha2", "jobsets"),
    ("snapshot.storage.k8s.io", "v1", "volumesnapshots"),
)
_MADE_BY_KUBERNETES = "kube-root-ca.crt"


def claims(grounds: Grounds) -> set[str]:
    """The names of all claims."""
    result = grounds.core.list_namespaced_persistent_volume_claim(grounds.namespace).items
    return {claim.metadata.name for claim in result}


def leftovers(grounds: Grounds) -> set[str]:
    """`kind/name` of everything that a run can leave behind, but for steps' pods and claims."""
    core, space = grounds.core, grounds.namespace
    result = {
        f"pods/{pod.metadata.name}"
        for pod in core.list_namespaced_pod(space).items
        if not {"harness", "workflows.argoproj.io/workflow"} & set(pod.metadata.labels or {})
    }
    result |= {
        f"services/{item.metadata.name}" for item in core.list_namespaced_service(space).items
    }
    result |= {
        f"configmaps/{item.metadata.name}"
        for item in core.list_namespaced_config_map(space).items
        if item.metadata.name != _MADE_BY_KUBERNETES
    }
    result |= {f"secrets/{item.metadata.name}" for item in core.list_namespaced_secret(space).items}
    batch = client.BatchV1Api(grounds.api)
    result |= {f"jobs/{item.metadata.name}" for item in batch.list_namespaced_job(space).items}
    for group, version, plural in _CUSTOM:
        listed = grounds.custom.list_namespaced_custom_object(group, version, space, plural)
        result |= {f"{plural}/{item['metadata']['name']}" for item in listed["items"]}
    return result
