"""The manifests of deploy/ for volumes under PodSecurity `restricted`."""

from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes import client

from tests.e2e.harness import grounds, step_pod
from tests.e2e.harness.grounds import UID, Grounds, until
from tests.e2e.harness.programs import kubectl
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

    _apply(ground, "storage/chown.yaml")
    refused = until(lambda: _events(ground, "kfp-ddp-chown"), "its refusal", 30)
    assert not refused[0].count("Created")

    _apply(ground, "storage/fsgroup.yaml")
    batch = client.BatchV1Api(ground.api)

    def ended() -> set[str]:
        status = batch.read_namespaced_job("kfp-ddp-fsgroup", ground.namespace).status
        return {item.type for item in status.conditions or ()} & {"Complete", "Failed"}

    assert until(ended, "the job's end", 60) == {"Complete"}
    assert _run(ground, "after", write, step, SECURITY) == "Succeeded"


def _apply(ground: Grounds, file: str) -> None:
    kubectl("apply", "-n", ground.namespace, "-f", str(DEPLOY / file))


def _events(ground: Grounds, name: str) -> list[str]:
    """Return the reasons of the events of an object."""
    selector = f"involvedObject.name={name}"
    events = ground.core.list_namespaced_event(ground.namespace, field_selector=selector).items
    return [event.reason for event in events]


def _run(
    ground: Grounds, name: str, script: str, pod: dict[str, Any], container: dict[str, Any]
) -> str:
    """Run a script with both claims mounted; the phase that its pod ended in."""
    body = step_pod.bare(name, ["sh", "-ec", script], data=DATA, work=WORK)
    body["spec"]["securityContext"] = pod
    body["spec"]["containers"][0]["securityContext"] = container
    ground.core.create_namespaced_pod(ground.namespace, body)
    return grounds.wait_for_end(ground, name, 60)
