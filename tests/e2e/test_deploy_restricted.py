"""The manifests of deploy/ for volumes under PodSecurity `restricted`."""

import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes import client

from tests.e2e.harness import grounds
from tests.e2e.harness.grounds import IMAGE, UID, Grounds, until
from tests.e2e.harness.rights import DEPLOY
from tests.e2e.harness.scene import DATA, WORK, namespace

pytestmark = pytest.mark.smoke

LEVEL = "pod-security.kubernetes.io/enforce"
SECURITY = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}


@pytest.fixture(scope="module")
def ground(cluster: client.ApiClient) -> Iterator[Grounds]:
    """A namespace with both claims, whose volumes belong to root."""
    with namespace(cluster) as space:
        for name in (DATA, WORK):
            grounds.claim(space, name)
        owned = "chown 0:0 /data /work; chmod 755 /data /work"
        assert _run(space, "root", owned, {"runAsUser": 0}, {}) == "Succeeded"
        patch = {"metadata": {"labels": {LEVEL: "restricted"}}}
        space.core.patch_namespace(space.namespace, patch)
        yield space


def test_the_job_with_an_fs_group_makes_volumes_writable(ground: Grounds) -> None:
    """It replaces chown.yaml, which is not permitted."""
    write = "touch /data/mine /work/mine"
    step = {"runAsUser": UID, "runAsGroup": UID, "runAsNonRoot": True}
    assert _run(ground, "before", write, step, SECURITY) == "Failed"

    chown = _apply(ground, "storage/chown.yaml")
    assert "would violate PodSecurity" in chown.stderr
    assert not until(lambda: _events(ground, "kfp-ddp-chown"), "its refusal", 30)[0].count(
        "Created"
    )

    applied = _apply(ground, "storage/fsgroup.yaml")
    assert applied.returncode == 0, applied.stderr
    assert "violate" not in applied.stderr
    batch = client.BatchV1Api(ground.api)

    def ended() -> set[str]:
        status = batch.read_namespaced_job("kfp-ddp-fsgroup", ground.namespace).status
        return {item.type for item in status.conditions or ()} & {"Complete", "Failed"}

    assert until(ended, "the job's end", 60) == {"Complete"}
    assert _run(ground, "after", write, step, SECURITY) == "Succeeded"


def _apply(ground: Grounds, file: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["kubectl", "apply", "-n", ground.namespace, "-f", str(DEPLOY / file)],
        capture_output=True,
        text=True,
        timeout=60,
    )


def _events(ground: Grounds, name: str) -> list[str]:
    """Return the reasons of the events of an object."""
    selector = f"involvedObject.name={name}"
    found = ground.core.list_namespaced_event(ground.namespace, field_selector=selector).items
    return [each.reason for each in found]


def _run(
    ground: Grounds, name: str, script: str, pod: dict[str, Any], container: dict[str, Any]
) -> str:
    """Run a script with both claims mounted; the phase that its pod ended in."""
    claims = {"data": DATA, "work": WORK}
    spec = {
        "restartPolicy": "Never",
        "securityContext": pod,
        "volumes": [
            {"name": volume, "persistentVolumeClaim": {"claimName": claims[volume]}}
            for volume in claims
        ],
        "containers": [
            {
                "name": "main",
                "image": IMAGE,
                "command": ["sh", "-ec", script],
                "securityContext": container,
                "volumeMounts": [{"name": v, "mountPath": f"/{v}"} for v in claims],
            }
        ],
    }
    ground.core.create_namespaced_pod(ground.namespace, {"metadata": {"name": name}, "spec": spec})

    def ended() -> str:
        phase = str(ground.core.read_namespaced_pod(name, ground.namespace).status.phase)
        return phase if phase in ("Succeeded", "Failed") else ""

    return until(ended, f"the end of {name}", 60)
