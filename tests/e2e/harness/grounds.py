"""Where a run is played: namespace, account, bucket, and the claims that can be looked into."""

import contextlib
import json
import re
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import unescape
from typing import Any, TypeVar
from urllib.parse import quote

import urllib3
from kubernetes import client

from kfp_ddp.core.container_images import REGISTRY, Images
from kfp_ddp.jobs.kinds import KINDS

IMAGES = Images.create({"registry": REGISTRY})
IMAGE = IMAGES.launcher
UID = 1000  # the user of our images
PATIENCE_SECONDS = 90.0
R = TypeVar("R")


@dataclass(frozen=True)
class Grounds:
    """A namespace with an account for the steps; `api` acts as the cluster's own controllers."""

    api: client.ApiClient
    namespace: str
    service_account: str
    environment: dict[str, str] = field(default_factory=dict)
    exact: bool = False
    """Whether steps' pods have all that KFP gives them, and request all that they are said to."""

    @property
    def core(self) -> Any:
        return client.CoreV1Api(self.api)

    @property
    def custom(self) -> Any:
        return client.CustomObjectsApi(self.api)

    def jobs(self, run_id: str, kind: str = "pytorchjob") -> list[dict[str, Any]]:
        """Return the jobs of a run."""
        resource = KINDS[kind].resource
        where = (*resource.group_version.split("/"), self.namespace, resource.plural)
        ask = self.custom.list_namespaced_custom_object
        listed = with_retries(lambda: ask(*where, label_selector=f"kfp-ddp/run-id={run_id}"))
        items: list[dict[str, Any]] = listed["items"]
        return items

    def workers(self, run_id: str) -> list[Any]:
        """Return the pods of a run's jobs."""
        ask = self.core.list_namespaced_pod
        listed = with_retries(
            lambda: ask(self.namespace, label_selector=f"kfp-ddp/run-id={run_id}")
        )
        items: list[Any] = listed.items
        return items


def with_retries(ask: Callable[[], R]) -> R:
    """Return the answer of the API server; retry while it restarts."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return ask()
        except (urllib3.exceptions.HTTPError, client.ApiException) as error:
            status = getattr(error, "status", None)
            if time.monotonic() > deadline or (status is not None and 400 <= status < 500):
                raise
        time.sleep(0.5)


def until(condition: Callable[[], R | None], what: str, seconds: float = 120.0) -> R:
    """Return the first true result of `condition`. Raise TimeoutError with `what`."""
    deadline = time.monotonic() + seconds
    while not (answer := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come within {seconds:.0f} s")
        time.sleep(0.2)
    return answer


def wait_for_end(grounds: Grounds, pod: str, seconds: float = 120.0) -> str:
    """Wait for the end of a pod; return its phase, Succeeded or Failed."""

    def phase() -> str:
        phase_name = str(grounds.core.read_namespaced_pod(pod, grounds.namespace).status.phase)
        return phase_name if phase_name in ("Succeeded", "Failed") else ""

    return until(phase, f"the end of {pod}", seconds)


def claim(
    grounds: Grounds,
    name: str,
    storage_class: str | None = None,
    size: str = "1Gi",
    mode: str = "ReadWriteMany",
) -> str:
    """Make a claim, by default one that many pods may write to; its name."""
    spec: dict[str, Any] = {"accessModes": [mode], "resources": {"requests": {"storage": size}}}
    if storage_class:
        spec["storageClassName"] = storage_class
    body = {"metadata": {"name": name}, "spec": spec}
    grounds.core.create_namespaced_persistent_volume_claim(grounds.namespace, body)
    return name


class Folder:
    """The files of a claim, read through a pod that serves them and the API server's proxy."""

    def __init__(self, grounds: Grounds, pod: str) -> None:
        self._grounds = grounds
        self._base = f"/api/v1/namespaces/{grounds.namespace}/pods/{pod}:8000/proxy"

    def read(self, path: str) -> bytes | None:
        """A file's content, None if there is none; `path` is relative to the claim's root."""

        def ask() -> bytes | None:
            try:
                answer = self._grounds.api.call_api(
                    f"{self._base}/{quote(path)}",
                    "GET",
                    auth_settings=["BearerToken"],
                    _preload_content=False,
                    _return_http_data_only=True,
                )
            except client.ApiException as error:
                if error.status == 404:
                    return None
                raise
            with contextlib.closing(answer):
                data: bytes = answer.read()
            return data

        return with_retries(ask)

    def events(self, path: str) -> list[dict[str, Any]]:
        """The whole lines of a file of JSON lines."""
        content = self.read(path)
        assert content is not None, f"{path} is not there"
        lines = content.splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith(b"\n")]

    def names(self, path: str = "") -> list[str]:
        """What a folder holds; folders end with a slash."""
        listing = self.read(path.strip("/") + "/")
        assert listing is not None, f"{path} is not there"
        return [
            unescape(name) for name in re.findall(r'<a href="[^"]*">([^<]+)</a>', listing.decode())
        ]


@contextmanager
def serve_files(grounds: Grounds, claim_name: str) -> Iterator[Folder]:
    """Serve the files of a PVC, read-only."""
    source = {"claimName": claim_name, "readOnly": True}  # a writer would hold up a snapshot
    pod = f"reader-{claim_name}"[:50].rstrip("-") + f"-{uuid.uuid4().hex[:5]}"
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": pod, "labels": {"harness": "reader"}},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 0,
            "securityContext": {"runAsUser": UID, "seccompProfile": {"type": "RuntimeDefault"}},
            "serviceAccountName": grounds.service_account,
            "automountServiceAccountToken": False,
            "volumes": [{"name": "claim", "persistentVolumeClaim": source}],
            "containers": [
                {
                    "name": "reader",
                    "image": IMAGE,
                    "command": ["python3", "-m", "http.server", "8000", "--directory", "/claim"],
                    "volumeMounts": [{"name": "claim", "mountPath": "/claim", "readOnly": True}],
                    "resources": {
                        "limits": {"cpu": "1", "memory": "256Mi"},
                        "requests": {"cpu": "10m", "memory": "64Mi"},
                    },
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "capabilities": {"drop": ["ALL"]},
                        "runAsNonRoot": True,
                    },
                    "readinessProbe": {"tcpSocket": {"port": 8000}, "periodSeconds": 1},
                }
            ],
        },
    }
    grounds.core.create_namespaced_pod(grounds.namespace, body)

    def ready() -> bool:
        status = with_retries(
            lambda: grounds.core.read_namespaced_pod(pod, grounds.namespace)
        ).status
        return any(c.type == "Ready" and c.status == "True" for c in status.conditions or [])

    try:
        until(ready, f"the reader of {claim_name}")
        yield Folder(grounds, pod)
    finally:
        with_retries(lambda: grounds.core.delete_namespaced_pod(pod, grounds.namespace))
