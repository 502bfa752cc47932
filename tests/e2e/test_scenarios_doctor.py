"""`kfp-ddp doctor` on namespaces that are ready for a run and on others, and GPUs of nodes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from tests.e2e.harness import grounds, queues
from tests.e2e.harness.gpus import advertise_gpus, lock_gpus
from tests.e2e.harness.grounds import Grounds
from tests.e2e.harness.namespace import DATA, WORK, namespace
from tests.e2e.harness.programs import kfp_ddp, kubectl
from tests.e2e.harness.rights import DEPLOY, RUNNER
from tests.e2e.harness.scene import Scene

ON_CPUS = ("--gpus-per-node", "0")
NAMESPACE = "namespace: kubeflow\n"
SOURCE: dict[str, Any] = {"source": "gs://nowhere", "recipe": "none"}
"""A bucket that preflight does not read, as nothing is sized."""


@pytest.fixture(scope="module")
def fit(cluster: client.ApiClient) -> Iterator[Grounds]:
    """A namespace with the rights of deploy/ and both claims."""
    with namespace(cluster) as ground:
        for name in (DATA, WORK):
            grounds.claim(ground, name)
        yield ground


def test_complete_namespace_passes(fit: Grounds) -> None:
    code, findings = _examine(fit.namespace, *ON_CPUS)
    assert [item for item in findings if item["state"] == "bad"] == []
    assert code == 0
    text = " ".join(f"{item['what']} {item['message']}" for item in findings)
    for part in ("1.36", "pytorchjobs", "trainjobs", "standard"):
        assert part in text, findings
    kinds = {item["what"] for item in findings if item["state"] == "ok"}
    assert {"PyTorchJob", "TrainJob", "TFJob", "MPIJob", "XGBoostJob"} <= kinds
    assert {"pods of steps", "pods of workers", f"claim {DATA}"} <= kinds
    assert all(item["remedy"] for item in findings if item["state"] != "ok"), findings


def test_each_missing_right_is_a_finding_with_a_remedy(cluster: client.ApiClient) -> None:
    """KFP's stock rights are enough for PyTorchJobs, so what they lack is a warning."""
    with namespace(cluster, ours=False) as ground:
        _, findings = _examine(ground.namespace, *ON_CPUS)
        _, trainjob = _examine(ground.namespace, *ON_CPUS, "--backend", "trainjob")
    missing = [item for item in findings if "no right" in item["message"]]
    of_queues = {"localqueues", "workloads"} if queues.served(cluster) else set()
    assert {item["what"].rpartition(" ")[2] for item in missing} == {
        "trainjobs",
        "rayjobs",
        "trainingruntimes",
        "events",
        "configmaps",
        *of_queues,
    }
    assert {item["state"] for item in missing} == {"warn"}
    for item in missing:
        assert "\n" not in item["message"]
        assert "kfp-ddp install" in item["remedy"]
    (job,) = (item for item in trainjob if item["what"] == "rights on trainjobs")
    assert job["state"] == "bad"


def _claim(name: str, mode: str = "ReadWriteMany", **spec: Any) -> dict[str, Any]:
    wanted = {"accessModes": [mode], "resources": {"requests": {"storage": "1Mi"}}, **spec}
    return {"kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": wanted}


def test_unusable_claim_is_a_finding_with_a_remedy(fit: Grounds) -> None:
    _make(fit, _claim("single", "ReadWriteOncePod"))
    examined = _examine(fit.namespace, *ON_CPUS, "--work-claim", "single")
    state, message, remedy = _of(examined, "claim single")
    assert (examined[0], state) == (1, "bad")
    assert "ReadWriteOncePod, and the launching step and the workers mount it" in message
    assert "again as ReadWriteMany" in remedy


@pytest.mark.parametrize(
    ("body", "options"),
    [
        (_claim("lazy", storageClassName="late"), ("--data-claim", "lazy")),
        (_claim("block", "ReadWriteOnce"), ("--data-claim", "block", "--work-claim", "block")),
    ],
    ids=["bound at first use", "one node"],
)
def test_valid_pvcs_pass(fit: Grounds, body: dict[str, Any], options: tuple[str, ...]) -> None:
    _make(fit, body)
    code, findings = _examine(fit.namespace, *ON_CPUS, *options)
    assert [item for item in findings if item["state"] == "bad"] == []
    assert code == 0


def test_open_number_of_gpus_needs_gpu_nodes_and_the_right_to_list_them(fit: Grounds) -> None:
    with lock_gpus():
        _, findings = _examine(fit.namespace)
    bad = {item["what"]: item["remedy"] for item in findings if item["state"] == "bad"}
    assert set(bad) == {"rights on nodes", "GPUs"}
    assert "kfp-ddp install" in bad["rights on nodes"]
    assert bad["GPUs"].startswith("give gpus_per_node: as many as an autoscaler's nodes will have")


def test_quota_refuses_argos_containers_until_its_remedy(cluster: client.ApiClient) -> None:
    with namespace(cluster, labels={"pod-security.kubernetes.io/enforce": "restricted"}) as ground:
        hard = {"requests.cpu": "8", "limits.memory": "64Gi"}
        quota = {"metadata": {"name": "compute"}, "spec": {"hard": hard}}
        ground.core.create_namespaced_resource_quota(ground.namespace, quota)
        before = _of(_examine(ground.namespace, *ON_CPUS), "pods of steps")
        kubectl(*before[2].split()[1:])
        after = _of(_examine(ground.namespace, *ON_CPUS), "pods of steps")
        quota["spec"] = {"hard": {**hard, "requests.cpu": "200m"}}
        ground.core.patch_namespaced_resource_quota("compute", ground.namespace, quota)
        small = _of(_examine(ground.namespace, *ON_CPUS), "pods of steps")
    assert before[0] == "bad"
    assert "failed quota: compute: must specify" in before[1]
    level = "PodSecurity restricted (of kfp-ddp compile --restricted)"
    assert after == ("ok", f"are admitted, by {level} and quota compute", "")
    assert (small[0], small[2]) == ("bad", "raise that quota")
    assert "exceeded quota: compute" in small[1]


def test_refused_pods_of_steps_and_workers_are_findings(cluster: client.ApiClient) -> None:
    with namespace(cluster) as ground:
        limit = {"type": "Container", "max": {"memory": "1Gi"}}
        body = {"metadata": {"name": "low"}, "spec": {"limits": [limit]}}
        ground.core.create_namespaced_limit_range(ground.namespace, body)
        findings = _examine(ground.namespace, *ON_CPUS)
    for what in ("pods of steps", "pods of workers"):
        state, message, remedy = _of(findings, what)
        assert state == "bad"
        assert "maximum memory usage per Container is 1Gi" in message
        assert remedy


def _make(ground: Grounds, body: dict[str, Any]) -> None:
    ground.core.create_namespaced_persistent_volume_claim(ground.namespace, body)
    if not body["spec"].get("storageClassName"):
        read, name = ground.core.read_namespaced_persistent_volume_claim, body["metadata"]["name"]
        grounds.until(lambda: read(name, ground.namespace).status.phase == "Bound", name, 60)


def _of(examined: tuple[int, list[dict[str, Any]]], what: str) -> tuple[str, str, str]:
    (findings,) = (item for item in examined[1] if item["what"] == what)
    return findings["state"], findings["message"], findings["remedy"]


def _examine(space: str, *options: str, account: str = RUNNER) -> tuple[int, list[dict[str, Any]]]:
    where = ("--namespace", space, "--service-account", account)
    done = kfp_ddp("doctor", "--json", *where, *options)
    assert not done.stderr, done.stderr
    findings: list[dict[str, Any]] = json.loads(done.stdout)["findings"]
    return done.returncode, findings


@pytest.fixture
def right(scene: Scene, tmp_path: Path) -> Iterator[None]:
    """The right of `deploy/rbac/nodes`, applied as the comment in its files says."""
    for file in (DEPLOY / "rbac" / "nodes").iterdir():
        text = file.read_text()
        if file.name == "kustomization.yaml":
            assert text.count(NAMESPACE) == 1
            text = text.replace(NAMESPACE, f"namespace: {scene.grounds.namespace}\n")
        (tmp_path / file.name).write_text(text)
    kubectl("apply", "-k", str(tmp_path), "--validate=strict")
    yield
    kubectl("delete", "-k", str(tmp_path), "--wait=false")


@pytest.mark.usefixtures("right")
def test_pods_request_the_gpus_of_a_node(scene: Scene) -> None:
    with advertise_gpus(scene.grounds.api, 3) as gpu:
        run = scene.run(**SOURCE, job={"gpu_resource": gpu}).play()
    plan = run.steps["preflight"]
    assert plan.succeeded, run.explain()
    assert plan.outputs["job"]["gpus_per_node"] == 3
    assert "pytorchjob of 1 pod, 3 GPUs each" in plan.log
