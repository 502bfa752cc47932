"""The few calls to Kubernetes that publishing needs, and what their refusals mean."""

import os
from collections.abc import Callable

from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.core.text import one_line
from kfp_ddp.jobs.identity import live_runs
from kfp_ddp.k8s.api import NAMESPACE_FILE, STARTING, Api, ApiError, Object, core, custom

SNAPSHOTS = ("snapshot.storage.k8s.io", "v1", "volumesnapshots")
GCP_SOURCES = ("datalayer.gke.io", "v1", "gcpdatasources")


class Refused(Exception):  # noqa: N818
    """The service account has no right to this, or the API is not installed."""


class Cluster:
    """Claims, snapshots and pods of one namespace, as JSON."""

    def __init__(self, api: Api) -> None:
        self._api, self.namespace = api, api.namespace

    def claim(self, name: str) -> Object | None:
        """A claim, or None."""
        return self._ask(f"get claim {name}", "GET", self._claim_path(name), empty=404) or None

    def create_claim(self, body: Object) -> Object | None:
        """Create a claim; the one that is there already if another was faster."""
        name = body["metadata"]["name"]
        made = self._ask(f"create claim {name}", "POST", self._claim_path(), body, empty=409)
        return made or self.claim(name)

    def label_claim(self, name: str, metadata: Object) -> Object:
        """Add labels and annotations to a claim; returns it."""
        path = self._claim_path(name)
        return self._ask(f"patch claim {name}", "PATCH", path, {"metadata": metadata})

    def delete_claim(self, name: str) -> None:
        """Delete a PVC if it exists."""
        self._ask(f"delete claim {name}", "DELETE", self._claim_path(name), empty=404)

    def delete_unchanged(self, claim: Object) -> bool:
        """Delete a PVC unless it changed since it was read; return whether it was deleted."""
        about = claim["metadata"]
        seen = {"uid": about["uid"], "resourceVersion": about["resourceVersion"]}
        what, path = f"delete claim {about['name']}", self._claim_path(about["name"])
        return bool(self._ask(what, "DELETE", path, {"preconditions": seen}, empty=409))

    def live_runs(self) -> Callable[[str], bool]:
        """Return a function that tests whether a run is alive.

        Raises:
            StorageError: it cannot be seen.
        """
        return live_runs(self._api)

    def claims(self, selector: str) -> list[Object]:
        """The claims with these labels."""
        return self._list("list claims", self._claim_path(), {"labelSelector": selector})

    def users(self, claim: str, writing: bool = False) -> list[str]:
        """Names of the pods that use a claim and have not ended; `writing`: not read-only."""
        pods = []
        for pod in self._list("list pods", core(self.namespace, "pods")):
            if pod["status"].get("phase") in ("Succeeded", "Failed"):
                continue
            for volume in pod["spec"].get("volumes", []):
                source = volume.get("persistentVolumeClaim", {})
                if source.get("claimName") == claim and not (writing and source.get("readOnly")):
                    pods.append(pod["metadata"]["name"])
        return pods

    def attached(self, volume: str) -> list[str]:
        """Names of the nodes that a volume is attached to.

        Raises:
            Refused: attachments are not visible to this service account.
        """
        path = "/apis/storage.k8s.io/v1/volumeattachments"
        return [
            item["spec"]["nodeName"]
            for item in self._list("list volumeattachments", path)
            if item["spec"]["source"].get("persistentVolumeName") == volume
        ]

    def custom(self, kind: tuple[str, str, str], name: str) -> Object | None:
        """An object of an API that may not be installed, or None."""
        what = f"get {kind[2]} {name}"
        return self._ask(what, "GET", self._custom_path(kind, name), empty=404) or None

    def create_custom(self, kind: tuple[str, str, str], body: Object) -> None:
        """Create such an object; one that is there already is as good.

        Raises:
            Refused: the API is not installed, or there is no right to it.
        """
        what = f"create {kind[2]} {body['metadata']['name']}"
        self._ask(what, "POST", self._custom_path(kind), body, empty=409)

    def delete_custom(self, kind: tuple[str, str, str], name: str) -> None:
        """Delete an object of this kind if it exists."""
        self._ask(f"delete {kind[2]} {name}", "DELETE", self._custom_path(kind, name), empty=404)

    def storage_class(self, name: str) -> Object | None:
        """A storage class, or None.

        Raises:
            Refused: it is not visible to this service account.
        """
        path = f"/apis/storage.k8s.io/v1/storageclasses/{name}"
        return self._ask(f"get storage class {name}", "GET", path, empty=404) or None

    def snapshot_drivers(self) -> set[str]:
        """Drivers that some VolumeSnapshotClass is for.

        Raises:
            Refused: the classes are not visible, or snapshots are not installed.
        """
        path = f"/apis/{SNAPSHOTS[0]}/{SNAPSHOTS[1]}/volumesnapshotclasses"
        return {item["driver"] for item in self._list("list volumesnapshotclasses", path)}

    def _claim_path(self, name: str = "") -> str:
        return core(self.namespace, "persistentvolumeclaims", name)

    def _custom_path(self, kind: tuple[str, str, str], name: str = "") -> str:
        group, version, plural = kind
        return custom(f"{group}/{version}", self.namespace, plural, name)

    def _list(self, what: str, path: str, query: dict[str, str] | None = None) -> list[Object]:
        items: list[Object] = self._ask(what, "GET", path, query=query)["items"]
        return items

    def _ask(
        self,
        what: str,
        method: str,
        path: str,
        body: Object | None = None,
        query: dict[str, str] | None = None,
        empty: int | None = None,
    ) -> Object:
        """The answer, over a bad minute of the server; an empty one for the status `empty`.

        Raises:
            Refused: by a server that has started wholly.
            StorageError: with the server's own words, or that it does not answer.
        """
        try:
            return self._api.call(method, path, body, query, retry=True)
        except ApiError as error:
            if error.status == empty:
                return {}
            if error.status in STARTING:
                raise Refused(f"{what}: {error.reason}") from error
            reason = one_line(error.message)
            if error.transient and error.status:  # without a status the message says so
                reason = f"the API server does not answer ({reason})"
            raise StorageError(f"cannot {what}: {reason}") from error


def connect() -> Cluster | None:
    """The cluster and namespace that this runs in; None outside of any."""
    if not os.environ.get("KUBERNETES_SERVICE_HOST"):
        return None
    if not os.access(NAMESPACE_FILE, os.R_OK):
        raise InputError(
            "the pod has no service account token; set automountServiceAccountToken to true"
        )
    return Cluster(Api.connect())
