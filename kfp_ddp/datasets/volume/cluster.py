"""Requests to the Kubernetes API for publishing, and what a refusal means."""

import os
from typing import NamedTuple

from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.core.text import one_line
from kfp_ddp.k8s.api import NAMESPACE_FILE, STARTING, Api, ApiError, Object


class Resource(NamedTuple):
    """A kind of resource; the core group is ''."""

    group: str
    version: str
    plural: str
    namespaced: bool = True

    @property
    def word(self) -> str:
        """Return the name of the kind in messages."""
        return "claim" if self == CLAIMS else self.plural


CLAIMS = Resource("", "v1", "persistentvolumeclaims")
PODS = Resource("", "v1", "pods")
SNAPSHOTS = Resource("snapshot.storage.k8s.io", "v1", "volumesnapshots")
SNAPSHOT_CLASSES = Resource(
    "snapshot.storage.k8s.io", "v1", "volumesnapshotclasses", namespaced=False
)
GCP_SOURCES = Resource("datalayer.gke.io", "v1", "gcpdatasources")
STORAGE_CLASSES = Resource("storage.k8s.io", "v1", "storageclasses", namespaced=False)
ATTACHMENTS = Resource("storage.k8s.io", "v1", "volumeattachments", namespaced=False)


class Refused(Exception):  # noqa: N818
    """The service account has no right to this, or the API is not installed."""


class VolumeApi:
    """PVCs, snapshots and pods of one namespace, as JSON; each request may raise `Refused`."""

    def __init__(self, api: Api) -> None:
        self.api, self.namespace = api, api.namespace

    def get(self, kind: Resource, name: str) -> Object | None:
        """Return an object; None if it is missing."""
        return self._ask(f"get {kind.word} {name}", "GET", kind, name, empty=404) or None

    def items(self, kind: Resource, query: dict[str, str] | None = None) -> list[Object]:
        """Return the objects of a kind."""
        items: list[Object] = self._ask(f"list {kind.word}", "GET", kind, query=query)["items"]
        return items

    def create(self, kind: Resource, body: Object) -> Object | None:
        """Create an object; return None if one of this name exists."""
        what = f"create {kind.word} {body['metadata']['name']}"
        return self._ask(what, "POST", kind, body=body, empty=409) or None

    def delete(self, kind: Resource, name: str) -> None:
        """Delete an object if it exists."""
        self._ask(f"delete {kind.word} {name}", "DELETE", kind, name, empty=404)

    def delete_unchanged(self, claim: Object) -> bool:
        """Delete a PVC unless it changed since it was read; return whether it was deleted."""
        about = claim["metadata"]
        name, seen = about["name"], {key: about[key] for key in ("uid", "resourceVersion")}
        body = {"preconditions": seen}
        return bool(self._ask(f"delete claim {name}", "DELETE", CLAIMS, name, body, empty=409))

    def label_claim(self, name: str, metadata: Object) -> Object:
        """Add labels and annotations to a PVC; return it."""
        return self._ask(f"patch claim {name}", "PATCH", CLAIMS, name, {"metadata": metadata})

    def users(self, claim: str, writing: bool = False) -> list[str]:
        """Return the names of the running pods that mount a PVC; `writing`: not read-only."""
        pods = []
        for pod in self.items(PODS):
            if pod["status"].get("phase") in ("Succeeded", "Failed"):
                continue
            for volume in pod["spec"].get("volumes", []):
                source = volume.get("persistentVolumeClaim", {})
                if source.get("claimName") == claim and not (writing and source.get("readOnly")):
                    pods.append(pod["metadata"]["name"])
        return pods

    def _ask(
        self,
        what: str,
        method: str,
        kind: Resource,
        name: str = "",
        body: Object | None = None,
        query: dict[str, str] | None = None,
        empty: int | None = None,
    ) -> Object:
        """Return the response, retried; {} for the status `empty`; Refused, StorageError."""
        path = f"/apis/{kind.group}/{kind.version}" if kind.group else f"/api/{kind.version}"
        path += f"/namespaces/{self.namespace}" if kind.namespaced else ""
        path += f"/{kind.plural}/{name}".rstrip("/")
        try:
            return self.api.call(method, path, body, query, retry=True)
        except ApiError as error:
            if error.status == empty:
                return {}
            if error.status in STARTING:
                raise Refused(f"{what}: {error.reason}") from error
            reason = one_line(error.message)
            if error.transient and error.status:  # without a status the message says so
                reason = f"the API server does not answer ({reason})"
            raise StorageError(f"cannot {what}: {reason}") from error


def connect() -> VolumeApi | None:
    """Return the cluster and namespace of this pod; None outside of any."""
    if not os.environ.get("KUBERNETES_SERVICE_HOST"):
        return None
    if not os.access(NAMESPACE_FILE, os.R_OK):
        raise InputError(
            "the pod has no service account token; set automountServiceAccountToken to true"
        )
    return VolumeApi(Api.connect())
