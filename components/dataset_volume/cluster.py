"""The few calls to Kubernetes that publishing needs, and what their refusals mean."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from kfp_ddp.training.errors import InputError

_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_TIMEOUT = 30
# A control plane that is upgraded can be away for minutes.
_PATIENCE = 300.0
# A starting API server answers these before it knows its own rights and the custom resources.
_STARTING = (401, 403, 404)
_UNSURE = 10  # seconds, with a server that does not say whether it has started
SNAPSHOTS = ("snapshot.storage.k8s.io", "v1", "volumesnapshots")
GCP_SOURCES = ("datalayer.gke.io", "v1", "gcpdatasources")
T = TypeVar("T")


class Refused(Exception):  # noqa: N818
    """The service account has no right to this, or the API is not installed."""

    def __init__(self, said: str, status: int = 0) -> None:
        super().__init__(said)
        self.status = status


class Cluster:
    """Claims, snapshots and pods of one namespace."""

    def __init__(self, api: Any, namespace: str) -> None:
        from kubernetes import client

        self.namespace = namespace
        self._api = api
        self._core = client.CoreV1Api(api)
        self._storage = client.StorageV1Api(api)
        self._custom = client.CustomObjectsApi(api)

    def claim(self, name: str) -> Any | None:
        """A claim, or None."""
        return self._get(
            f"get claim {name}", self._core.read_namespaced_persistent_volume_claim, name
        )

    def create_claim(self, body: dict[str, Any]) -> Any:
        """Create a claim; the one that is there already if another was faster."""
        name = body["metadata"]["name"]
        made = self._create(
            f"create claim {name}", self._core.create_namespaced_persistent_volume_claim, body
        )
        return made or self.claim(name)

    def label_claim(self, name: str, metadata: dict[str, Any]) -> None:
        """Add labels and annotations to a claim."""
        self._call(
            f"patch claim {name}",
            lambda: self._core.patch_namespaced_persistent_volume_claim(
                name, self.namespace, {"metadata": metadata}, _request_timeout=_TIMEOUT
            ),
        )

    def delete_claim(self, name: str) -> None:
        """Delete a claim if it is there."""
        self._get(
            f"delete claim {name}", self._core.delete_namespaced_persistent_volume_claim, name
        )

    def claims(self, selector: str) -> list[Any]:
        """The claims with these labels."""
        found = self._call(
            "list claims",
            lambda: self._core.list_namespaced_persistent_volume_claim(
                self.namespace, label_selector=selector, _request_timeout=_TIMEOUT
            ),
        )
        return list(found.items)

    def users(self, claim: str, writing: bool = False) -> list[str]:
        """Names of the pods that use a claim and have not ended; `writing`: not read-only."""
        pods = self._call(
            "list pods",
            lambda: self._core.list_namespaced_pod(self.namespace, _request_timeout=_TIMEOUT),
        )
        found = []
        for pod in pods.items:
            if pod.status.phase in ("Succeeded", "Failed"):
                continue
            for volume in pod.spec.volumes or []:
                source = volume.persistent_volume_claim
                if source and source.claim_name == claim and not (writing and source.read_only):
                    found.append(pod.metadata.name)
        return found

    def attached(self, volume: str) -> list[str]:
        """Names of the nodes that a volume is attached to.

        Raises:
            Refused: attachments are not visible to this service account.
        """
        found = self._call(
            "list volumeattachments",
            lambda: self._storage.list_volume_attachment(_request_timeout=_TIMEOUT),
        )
        return [
            item.spec.node_name
            for item in found.items
            if item.spec.source.persistent_volume_name == volume
        ]

    def custom(self, kind: tuple[str, str, str], name: str) -> dict[str, Any] | None:
        """An object of an API that may not be installed, or None."""
        group, version, plural = kind
        found: dict[str, Any] | None = self._get(
            f"get {plural} {name}",
            lambda n, space, **more: self._custom.get_namespaced_custom_object(
                group, version, space, plural, n, **more
            ),
            name,
        )
        return found

    def create_custom(self, kind: tuple[str, str, str], body: dict[str, Any]) -> None:
        """Create such an object; one that is there already is as good.

        Raises:
            Refused: the API is not installed, or there is no right to it.
        """
        group, version, plural = kind
        self._create(
            f"create {plural} {body['metadata']['name']}",
            lambda space, b, **more: self._custom.create_namespaced_custom_object(
                group, version, space, plural, b, **more
            ),
            body,
        )

    def delete_custom(self, kind: tuple[str, str, str], name: str) -> None:
        """Delete such an object if it is there."""
        group, version, plural = kind
        self._get(
            f"delete {plural} {name}",
            lambda n, space, **more: self._custom.delete_namespaced_custom_object(
                group, version, space, plural, n, **more
            ),
            name,
        )

    def storage_class(self, name: str) -> Any | None:
        """A storage class, or None.

        Raises:
            Refused: it is not visible to this service account.
        """
        return self._get(
            f"get storage class {name}",
            lambda n, _, **more: self._storage.read_storage_class(n, **more),
            name,
        )

    def snapshot_drivers(self) -> set[str]:
        """Drivers that some VolumeSnapshotClass is for.

        Raises:
            Refused: the classes are not visible, or snapshots are not installed.
        """
        found = self._call(
            "list volumesnapshotclasses",
            lambda: self._custom.list_cluster_custom_object(
                SNAPSHOTS[0], SNAPSHOTS[1], "volumesnapshotclasses", _request_timeout=_TIMEOUT
            ),
        )
        return {item["driver"] for item in found["items"]}

    def _get(self, what: str, call: Callable[..., T], name: str) -> T | None:
        try:
            return self._call(what, lambda: call(name, self.namespace, _request_timeout=_TIMEOUT))
        except Refused as error:
            if error.status == 404:
                return None
            raise

    def _create(self, what: str, call: Callable[..., Any], body: dict[str, Any]) -> Any:
        from kubernetes.client.exceptions import ApiException

        def ask() -> Any:
            try:
                return call(self.namespace, body, _request_timeout=_TIMEOUT)
            except ApiException as error:
                if error.status == 409:
                    return None
                raise

        return self._call(what, ask)

    def _call(self, what: str, call: Callable[[], T]) -> T:
        """Turn refusals into `Refused`, and a server that is away for a while into patience."""
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        pause, deadline = 0.5, time.monotonic() + _PATIENCE
        while time.monotonic() < deadline:
            try:
                return self._sure(call)
            except ApiException as error:
                if error.status in (401, 403, 404):
                    raise Refused(f"{what}: {error.reason}", error.status) from error
                if error.status not in (429, 500, 502, 503, 504):
                    raise InputError(f"cannot {what}: {_reason(error)}") from error
                problem = str(error.reason)
            except HTTPError as error:
                problem = type(error).__name__
            time.sleep(pause)
            pause = min(pause * 2, 5.0)
        raise InputError(f"cannot {what}: the API server does not answer ({problem})")

    def _sure(self, call: Callable[[], T]) -> T:
        """What `call` returns; a refusal counts only from a server that has started wholly."""
        from kubernetes.client.exceptions import ApiException

        for _ in range(_UNSURE):
            try:
                return call()
            except ApiException as error:
                if error.status not in _STARTING:
                    raise
            try:
                self._api.call_api("/readyz", "GET", auth_settings=["BearerToken"])
                break
            except ApiException as error:
                if error.status not in _STARTING:
                    raise
            time.sleep(1)
        return call()


def connect() -> Cluster | None:
    """The cluster and namespace that this runs in; None outside of any."""
    if not os.environ.get("KUBERNETES_SERVICE_HOST"):
        return None
    from kubernetes import client, config

    try:
        namespace = _NAMESPACE.read_text().strip()
    except OSError as error:
        raise InputError(
            "the pod has no service account token; set automountServiceAccountToken to true"
        ) from error
    configuration = client.Configuration()
    config.load_incluster_config(client_configuration=configuration)
    return Cluster(client.ApiClient(configuration), namespace)


def _reason(error: Any) -> str:
    """The server's own words, in one line."""
    import json

    try:
        return str(json.loads(error.body)["message"]).splitlines()[0]
    except (ValueError, KeyError, TypeError, IndexError):
        return str(error.reason)
