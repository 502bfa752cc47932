"""The resources of the cluster for publishing, and requests about claims."""

import os

from kfp_ddp.core.errors import InputError
from kfp_ddp.k8s.api import NAMESPACE_FILE, Api, Object, unless
from kfp_ddp.k8s.objects import has_ended
from kfp_ddp.k8s.resource import PODS, Resource

ROLE = "deploy/storage"
SNAPSHOT_VERSION = "snapshot.storage.k8s.io/v1"
CLAIMS = Resource("v1", "persistentvolumeclaims", role=ROLE)
SNAPSHOTS = Resource(SNAPSHOT_VERSION, "volumesnapshots", role=ROLE)
SNAPSHOT_CLASSES = Resource(SNAPSHOT_VERSION, "volumesnapshotclasses", namespaced=False, role=ROLE)
ATTACHMENTS = Resource("storage.k8s.io/v1", "volumeattachments", namespaced=False, role=ROLE)


def create_unless_exists(api: Api, resource: Resource, body: Object) -> Object | None:
    """Create an object; return None if one of this name exists."""
    with unless(409):
        return api.create(resource, body, retry=True)
    return None


def delete_unchanged(api: Api, claim: Object) -> bool:
    """Delete a PVC unless it changed since it was read; return whether it was deleted."""
    metadata = claim["metadata"]
    seen = {key: metadata[key] for key in ("uid", "resourceVersion")}
    with unless(409):
        api.delete(CLAIMS, metadata["name"], {"preconditions": seen})
        return True
    return False


def pods_mounting(api: Api, claim: str, writing: bool = False) -> list[str]:
    """Return the names of the running pods that mount a PVC; `writing`: not read-only."""
    names = []
    for pod in api.list_objects(PODS, retry=True):
        if has_ended(pod):
            continue
        for volume in pod["spec"].get("volumes", []):
            source = volume.get("persistentVolumeClaim", {})
            if source.get("claimName") != claim:
                continue
            if not writing or not source.get("readOnly"):
                names.append(pod["metadata"]["name"])
    return names


def connect() -> Api | None:
    """Return the cluster and namespace of this pod; None outside of any."""
    if not os.environ.get("KUBERNETES_SERVICE_HOST"):
        return None
    if not os.access(NAMESPACE_FILE, os.R_OK):
        raise InputError(
            "the pod has no service account token; set automountServiceAccountToken to true"
        )
    return Api.connect()
