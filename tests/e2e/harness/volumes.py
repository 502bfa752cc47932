"""Claims to publish from and pods that use them, with the rights of KFP's stock account."""

import contextlib
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes import client

from kfp_ddp.datasets.volume.cluster import Cluster
from kfp_ddp.datasets.volume.request import Request
from kfp_ddp.k8s.api import Api
from tests.e2e.harness import rights
from tests.e2e.harness.grounds import IMAGE, UID, until

SIZE = "64Mi"


class Ground:
    """A namespace, its stock account, and pods that run to their end."""

    def __init__(self, api: Any, namespace: str) -> None:
        self.api, self.namespace = api, namespace
        self.core = client.CoreV1Api(api)
        self.account = rights.grant(api, namespace, ours=False)
        self.admin = Cluster(Api(api, namespace))
        self.stock = self._as_account(self.account)

    def account_with(self, *rules: dict[str, list[str]], name: str = "") -> Cluster:
        """The cluster as an account sees it that has these rights and no more."""
        name = name or f"account-{uuid.uuid4().hex[:6]}"
        self.core.create_namespaced_service_account(self.namespace, {"metadata": {"name": name}})
        rights.bind(self.api, self.namespace, name, list(rules), account=name)
        return self._as_account(name)

    def _as_account(self, name: str) -> Cluster:
        """The cluster with the account's own token."""
        body = client.AuthenticationV1TokenRequest(
            spec=client.V1TokenRequestSpec(audiences=[], expiration_seconds=3600)
        )
        token = self.core.create_namespaced_service_account_token(
            name, self.namespace, body
        ).status.token
        configuration = client.Configuration()
        configuration.host = self.api.configuration.host
        configuration.ssl_ca_cert = self.api.configuration.ssl_ca_cert
        configuration.api_key = {"authorization": f"Bearer {token}"}
        return Cluster(Api(client.ApiClient(configuration), self.namespace))

    def staging(self, storage_class: str, mode: str = "ReadWriteOnce") -> str:
        """A claim to sync to."""
        name = f"staging-{uuid.uuid4().hex[:6]}"
        spec = {
            "accessModes": [mode],
            "storageClassName": storage_class,
            "resources": {"requests": {"storage": SIZE}},
        }
        body = {"metadata": {"name": name}, "spec": spec}
        self.core.create_namespaced_persistent_volume_claim(self.namespace, body)
        return name

    @contextlib.contextmanager
    def pod(
        self, code: str, claim: str = "", read_only: bool = False, token: bool = True
    ) -> Iterator[str]:
        """A pod that runs a program, with a claim at /data and its account's token."""
        name = f"pod-{uuid.uuid4().hex[:6]}"
        source = {"claimName": claim, "readOnly": read_only}
        mount = {"name": "data", "mountPath": "/data", "readOnly": read_only}
        container = {
            "name": "main",
            "image": IMAGE,
            "command": ["python3", "-c", code],
            "volumeMounts": [mount] if claim else [],
        }
        spec = {
            "restartPolicy": "Never",
            "serviceAccountName": self.account,
            "automountServiceAccountToken": token,
            "terminationGracePeriodSeconds": 0,
            "securityContext": {"runAsUser": UID, "fsGroup": UID},
            "volumes": [{"name": "data", "persistentVolumeClaim": source}] if claim else [],
            "containers": [container],
        }
        self.core.create_namespaced_pod(self.namespace, {"metadata": {"name": name}, "spec": spec})
        try:
            yield name
        finally:
            self.core.delete_namespaced_pod(name, self.namespace, grace_period_seconds=0)

    def run(self, code: str, claim: str = "", read_only: bool = False) -> str:
        """The program's output, once it has ended well."""
        with self.pod(code, claim, read_only) as name:
            phase = until(lambda: self.ended(name), f"the end of {name}")
            log = str(self.core.read_namespaced_pod_log(name, self.namespace))
            assert phase == "Succeeded", log
        return log.strip()

    def ended(self, pod: str) -> str:
        """The phase that a pod has ended in; '' before."""
        phase = str(self.core.read_namespaced_pod(pod, self.namespace).status.phase)
        return phase if phase in ("Succeeded", "Failed") else ""

    def claim(self, name: str) -> Any:
        return self.core.read_namespaced_persistent_volume_claim(name, self.namespace)

    def gone(self, name: str) -> bool:
        """Whether a claim is deleted, or about to be."""
        try:
            return self.claim(name).metadata.deletion_timestamp is not None
        except client.ApiException as error:
            return bool(error.status == 404)


@pytest.fixture(scope="module")
def ground(cluster: Any) -> Iterator[Ground]:
    name = f"volume-{uuid.uuid4().hex[:6]}"
    core = client.CoreV1Api(cluster)
    core.create_namespace({"metadata": {"name": name}})
    try:
        yield Ground(cluster, name)
    finally:
        core.delete_namespace(name)


def request(claim: str, digest: str, **more: Any) -> Request:
    path = f"/data/versions/{digest[:12]}"
    more.setdefault("dataset", "digits")
    more.setdefault("wait_seconds", 60.0)
    return Request.create(digest=digest, path=path, claim=claim, **more)
