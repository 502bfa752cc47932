"""`kfp-ddp install` into a fresh namespace, into one that has it, and where it may not."""

import json
import subprocess
import sys
from typing import Any

import pytest
from kubernetes import client

from kfp_ddp.core.errors import InputError
from kfp_ddp.install import Installation, apply, manifests
from kfp_ddp.k8s.api import Api
from tests.e2e.harness.grounds import IMAGE, UID, Grounds, until
from tests.e2e.harness.scene import DATA, WORK, namespace

pytestmark = pytest.mark.smoke

RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}
WITH = ("--storage-class", "standard", "--size", "1Gi")


def test_a_rehearsal_makes_nothing_the_install_all_and_a_second_one_changes_nothing(
    cluster: client.ApiClient,
) -> None:
    with namespace(cluster, ours=False) as ground:
        code, rehearsed = _install(ground, "--dry-run")
        assert code == 0
        assert _claims(ground) == {}
        try:
            code, made = _install(ground, "--image", IMAGE)
            assert code == 0
            code, again = _install(ground)
        finally:
            _drop_the_binding(ground)
        assert code == 0
        assert {each["state"] for each in again["objects"]} == {"unchanged", "left"}
        assert set(_claims(ground)) == {DATA, WORK}
        states = {each["kind"]: each["state"] for each in rehearsed["objects"]}
        assert states.pop("ClusterRole") in ("made", "unchanged")
        assert set(states.values()) == {"made"}
        jobs = [each["name"] for each in made["objects"] if each["kind"] == "Job"]
        assert jobs == ["kfp-ddp-chown"]
        assert _written(ground) == "Succeeded"
        doctor = _program("doctor", "-n", ground.namespace, "--gpus-per-node", "0", "--json")
        assert doctor.returncode == 0, doctor.stdout


def test_what_somebody_changed_is_set_right_and_a_claim_is_left(cluster: client.ApiClient) -> None:
    with namespace(cluster, ours=False) as ground:
        _install(ground, "--no-see-nodes", "--chown", "no")
        rights = client.RbacAuthorizationV1Api(ground.api)
        role = "kfp-ddp-launcher", ground.namespace
        rules = len(rights.read_namespaced_role(*role).rules)
        rights.patch_namespaced_role(*role, {"rules": []})
        code, found = _install(ground, "--no-see-nodes", "--size", "5Gi")
        assert code == 0
        states = {
            each["name"]: each["state"] for each in found["objects"] if each["kind"] != "Role"
        }
        assert states == {DATA: "left", WORK: "left", role[0]: "unchanged", "kfp-ddp": "unchanged"}
        assert len(rights.read_namespaced_role(*role).rules) == rules
        assert _claims(ground)[DATA].spec.resources.requests["storage"] == "1Gi"


def test_one_refusal_leaves_nothing_behind(cluster: client.ApiClient) -> None:
    """KFP's own account may make claims, but no roles with rights that it lacks."""
    with namespace(cluster, ours=False) as ground:
        account = client.ApiClient(cluster.configuration)
        who = f"system:serviceaccount:{ground.namespace}:{ground.service_account}"
        account.set_default_header("Impersonate-User", who)
        api = Api(account, ground.namespace)
        objects = manifests(Installation(ground.namespace, "standard", size="1Gi"))
        with pytest.raises(InputError, match=r"^Role kfp-ddp-launcher is refused: .*; nothing was"):
            apply(api, objects)
        assert _claims(ground) == {}


def test_under_restricted_the_volumes_are_given_by_group_and_a_quota_brings_limits(
    cluster: client.ApiClient,
) -> None:
    with namespace(cluster, ours=False, labels=RESTRICTED) as ground:
        quota = {"metadata": {"name": "all"}, "spec": {"hard": {"limits.memory": "64Gi"}}}
        ground.core.create_namespaced_resource_quota(ground.namespace, quota)
        code, found = _install(ground, "--no-see-nodes", "--image", IMAGE)
        made = {each["name"] for each in found["objects"] if each["kind"] in ("Job", "LimitRange")}
    assert code == 0
    assert made == {"kfp-ddp-fsgroup", "kfp-ddp"}


def test_what_is_installed_is_what_the_folders_of_deploy_hold(cluster: client.ApiClient) -> None:
    import yaml

    from kfp_ddp.install import DEPLOY

    ours = {_key(each): each for each in manifests(Installation("kubeflow", copies=True))}
    for folder in ("rbac", "rbac/nodes", "storage", "eviction"):
        built = subprocess.run(
            ["kubectl", "kustomize", str(DEPLOY.resolve() / folder)],
            capture_output=True,
            text=True,
            check=True,
        )
        for document in yaml.safe_load_all(built.stdout):
            mine = ours[_key(document)]
            for part in ("rules", "roleRef", "spec"):
                assert mine.get(part) == document.get(part)
            named = [each["name"] for each in document.get("subjects", ())]
            assert [each["name"] for each in mine.get("subjects", ())] == named


def _key(document: dict[str, Any]) -> tuple[str, str]:
    return document["kind"], document["metadata"]["name"]


def _install(ground: Grounds, *options: str) -> tuple[int, dict[str, Any]]:
    given = options if "--size" in options else (*WITH, *options)
    done = _program("install", "-n", ground.namespace, "--json", *WITH[:2], *given)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def _program(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "kfp_ddp", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def _claims(ground: Grounds) -> dict[str, Any]:
    found = ground.core.list_namespaced_persistent_volume_claim(ground.namespace).items
    return {each.metadata.name: each for each in found}


def _drop_the_binding(ground: Grounds) -> None:
    name = f"kfp-ddp-nodes.{ground.namespace}"
    client.RbacAuthorizationV1Api(ground.api).delete_cluster_role_binding(name)


def _written(ground: Grounds) -> str:
    """The phase in which a pod of the images' user ended that writes to both claims."""
    volumes = [
        {"name": name, "persistentVolumeClaim": {"claimName": name}} for name in (DATA, WORK)
    ]
    container = {
        "name": "main",
        "image": IMAGE,
        "command": ["touch", f"/{DATA}/x", f"/{WORK}/x"],
        "volumeMounts": [{"name": name, "mountPath": f"/{name}"} for name in (DATA, WORK)],
        "securityContext": {"runAsUser": UID, "capabilities": {"drop": ["ALL"]}},
    }
    spec = {"containers": [container], "volumes": volumes, "restartPolicy": "Never"}
    body = {"metadata": {"name": "writes"}, "spec": spec}
    ground.core.create_namespaced_pod(ground.namespace, body)

    def ended() -> str:
        phase = ground.core.read_namespaced_pod("writes", ground.namespace).status.phase
        return str(phase) if phase in ("Succeeded", "Failed") else ""

    return until(ended, "its end", 90)
