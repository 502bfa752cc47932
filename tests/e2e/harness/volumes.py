"""Claims to publish from and pods that use them, with the rights of KFP's stock account."""

import contextlib
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes import client

from kfp_ddp.datasets.volume.request import VolumeRequest
from kfp_ddp.k8s.api import Api
from tests.e2e.harness import rights, step_pod
from tests.e2e.harness.grounds import Grounds, claim, wait_for_end
from tests.e2e.harness.namespace import namespace

SIZE = "64Mi"


class Ground:
    """A namespace, its stock account, and pods that run to their end."""

    def __init__(self, grounds: Grounds) -> None:
        self.grounds, self.api, self.namespace = grounds, grounds.api, grounds.namespace
        self.core = grounds.core
        self.admin = Api(self.api, self.namespace)
        self.stock = self._as_account(grounds.service_account)

    def account_with(self, *rules: dict[str, list[str]], name: str = "") -> Api:
        """Return the cluster as an account sees it that has these rights and no more."""
        name = name or f"account-{uuid.uuid4().hex[:6]}"
        self.core.create_namespaced_service_account(self.namespace, {"metadata": {"name": name}})
        rights.bind(self.api, self.namespace, name, list(rules), account=name)
        return self._as_account(name)

    def _as_account(self, name: str) -> Api:
        configuration = rights.configured(self.api, self.namespace, name)
        return Api(client.ApiClient(configuration), self.namespace)

    def staging(self, storage_class: str, mode: str = "ReadWriteOnce") -> str:
        """Create a claim to sync to; return its name."""
        name = f"staging-{uuid.uuid4().hex[:6]}"
        return claim(self.grounds, name, storage_class, SIZE, mode)

    @contextlib.contextmanager
    def pod(
        self, code: str, claim: str = "", read_only: bool = False, token: bool = True
    ) -> Iterator[str]:
        """Run a program in a pod, with a claim at /data and its account's token."""
        name = f"pod-{uuid.uuid4().hex[:6]}"
        claims = {"data": claim} if claim else {}
        body = step_pod.bare(name, ["python3", "-c", code], **claims)
        for volume in body["spec"]["volumes"]:
            volume["persistentVolumeClaim"]["readOnly"] = read_only
        for mount in body["spec"]["containers"][0]["volumeMounts"]:
            mount["readOnly"] = read_only
        account = self.grounds.service_account
        body["spec"] |= {"serviceAccountName": account, "automountServiceAccountToken": token}
        self.core.create_namespaced_pod(self.namespace, body)
        try:
            yield name
        finally:
            self.core.delete_namespaced_pod(name, self.namespace, grace_period_seconds=0)

    def run(self, code: str, claim: str = "", read_only: bool = False) -> str:
        """The program's output, once it has ended well."""
        with self.pod(code, claim, read_only) as name:
            phase = wait_for_end(self.grounds, name)
            log = str(self.core.read_namespaced_pod_log(name, self.namespace))
            assert phase == "Succeeded", log
        return log.strip()

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
    with namespace(cluster, ours=False) as space:
        yield Ground(space)


def request(claim: str, digest: str, **more: Any) -> VolumeRequest:
    path = f"/data/versions/{digest[:12]}"
    more.setdefault("dataset", "digits")
    more.setdefault("wait_seconds", 60.0)
    return VolumeRequest.create(digest=digest, path=path, claim=claim, **more)
