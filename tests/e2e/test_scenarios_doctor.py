"""`kfp-ddp doctor` on a namespace where a run is possible, and on ones where one thing is not."""

import base64
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from tests.e2e.harness import grounds, queues
from tests.e2e.harness.gpus import advertised, no_gpus
from tests.e2e.harness.grounds import Grounds
from tests.e2e.harness.rights import DEPLOY, RUNNER
from tests.e2e.harness.scene import DATA, WORK, namespace

pytestmark = pytest.mark.smoke

ON_CPUS = ("--gpus-per-node", "0")


@pytest.fixture(scope="module")
def fit(cluster: client.ApiClient) -> Iterator[Grounds]:
    """A namespace with the rights of deploy/ and both claims."""
    with namespace(cluster) as ground:
        for name in (DATA, WORK):
            grounds.claim(ground, name)
        yield ground


def test_where_nothing_is_missing_it_is_content(fit: Grounds) -> None:
    code, found = _examine(fit.namespace, *ON_CPUS)
    assert [each for each in found if each["state"] == "bad"] == []
    assert code == 0
    whole = " ".join(f"{each['what']} {each['said']}" for each in found)
    for part in ("1.36", "pytorchjobs", "trainjobs", "standard"):
        assert part in whole, found
    kinds = {each["what"] for each in found if each["state"] == "ok"}
    assert {"PyTorchJob", "TrainJob", "TFJob", "MPIJob"} <= kinds
    assert {"pods of steps", "pods of workers", f"claim {DATA}"} <= kinds
    assert all(each["remedy"] for each in found if each["state"] != "ok"), found


def test_without_the_rights_of_deploy_each_missing_one_is_a_line_with_its_remedy(
    cluster: client.ApiClient,
) -> None:
    """KFP's stock rights are enough for PyTorchJobs, so what they lack is a warning."""
    with namespace(cluster, ours=False) as ground:
        _, found = _examine(ground.namespace, *ON_CPUS)
        _, trainjob = _examine(ground.namespace, *ON_CPUS, "--backend", "trainjob")
    lacking = [each for each in found if "no right" in each["said"]]
    of_queues = {"localqueues", "workloads"} if queues.served(cluster) else set()
    assert {each["what"].rpartition(" ")[2] for each in lacking} == {
        "trainjobs",
        "trainingruntimes",
        "events",
        "configmaps",
        *of_queues,
    }
    assert {each["state"] for each in lacking} == {"warn"}
    for each in lacking:
        assert "\n" not in each["said"]
        assert "deploy/rbac" in each["remedy"]
    (job,) = (each for each in trainjob if each["what"] == "rights on trainjobs")
    assert job["state"] == "bad"


def test_an_account_that_may_do_nothing_fails_the_check(fit: Grounds) -> None:
    code, found = _examine(fit.namespace, *ON_CPUS, account="default")
    assert code == 1
    assert any(each["state"] == "bad" and "pytorchjobs" in each["what"] for each in found), found


def _claim(name: str, mode: str = "ReadWriteMany", **spec: Any) -> dict[str, Any]:
    wanted = {"accessModes": [mode], "resources": {"requests": {"storage": "1Mi"}}, **spec}
    return {"kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": wanted}


def _secret(name: str, **data: str) -> dict[str, Any]:
    encoded = {key: base64.b64encode(text.encode()).decode() for key, text in data.items()}
    return {"kind": "Secret", "metadata": {"name": name}, "data": encoded}


GOOGLE_KEY = json.dumps({"type": "service_account", "client_email": "a@b", "private_key": "k"})
# What is made, the options, and the one finding that says so with its remedy.
STOPS: dict[str, tuple[dict[str, Any] | None, tuple[str, ...], str, str, str]] = {
    "no claim": (None, ("--work-claim", "other"), "claim other", "does not exist", "kubectl apply"),
    "a class that is not there": (
        _claim("classless", storageClassName="gold"),
        ("--data-claim", "classless"),
        "claim classless",
        "waits for the storage class gold",
        "with one of late, small, standard",
    ),
    "a claim of one pod": (
        _claim("single", "ReadWriteOncePod"),
        ("--work-claim", "single"),
        "claim single",
        "is ReadWriteOncePod, and the launching step and the workers mount it at once",
        "again as ReadWriteMany",
    ),
    "no secret": (
        None,
        ("--bucket-secret", "mine"),
        "secret mine",
        "does not exist",
        "kubectl create secret generic -n",
    ),
    "half a key of S3": (
        _secret("half", AWS_ACCESS_KEY_ID="a"),
        ("--bucket-secret", "half"),
        "secret half",
        "has AWS_ACCESS_KEY_ID without AWS_SECRET_ACCESS_KEY",
        "kubectl delete secret",
    ),
    "a secret of other keys": (
        _secret("foreign", accesskey="a", secretkey="b"),
        ("--bucket-secret", "foreign"),
        "secret foreign",
        "has accesskey, secretkey, and neither key.json nor AWS_ACCESS_KEY_ID",
        "kubectl delete secret",
    ),
    "a key that is none": (
        _secret("broken", **{"key.json": "{"}),
        ("--bucket-secret", "broken"),
        "secret broken",
        "its key.json is not JSON",
        "kubectl delete secret",
    ),
    "no gang": (
        None,
        ("--scheduler", "coscheduling"),
        "gangs of scheduler-plugins",
        "so pods would start one by one",
        "leave scheduler empty",
    ),
}


@pytest.mark.parametrize("case", STOPS)
def test_what_stops_a_run_is_one_finding_with_one_remedy(fit: Grounds, case: str) -> None:
    body, options, what, said, remedy = STOPS[case]
    if body:
        _make(fit, body)
    code, found = _examine(fit.namespace, *ON_CPUS, *options)
    (bad,) = (each for each in found if each["state"] == "bad")
    assert code == 1
    assert bad["what"] == what
    assert said in bad["said"]
    assert remedy in bad["remedy"]
    assert "\n" not in bad["said"] + bad["remedy"]


@pytest.mark.parametrize(
    ("body", "options"),
    [
        (_secret("google", **{"key.json": GOOGLE_KEY}), ("--bucket-secret", "google")),
        (
            _secret("amazon", AWS_ACCESS_KEY_ID="a", AWS_SECRET_ACCESS_KEY="b"),
            ("--bucket-secret", "amazon"),
        ),
        (_claim("lazy", storageClassName="late"), ("--data-claim", "lazy")),
        (_claim("block", "ReadWriteOnce"), ("--data-claim", "block", "--work-claim", "block")),
    ],
    ids=["a key of Google", "a key of S3", "bound when it is used", "one node alone"],
)
def test_what_fits_is_no_trouble(
    fit: Grounds, body: dict[str, Any], options: tuple[str, ...]
) -> None:
    _make(fit, body)
    code, found = _examine(fit.namespace, *ON_CPUS, *options)
    assert [each for each in found if each["state"] == "bad"] == []
    assert code == 0


def test_gpus_that_are_left_open_need_nodes_with_some_and_the_right_to_look(fit: Grounds) -> None:
    with no_gpus():
        _, found = _examine(fit.namespace)
    bad = {each["what"]: each["remedy"] for each in found if each["state"] == "bad"}
    assert set(bad) == {"rights on nodes", "GPUs"}
    assert "deploy/rbac/nodes" in bad["rights on nodes"]
    assert bad["GPUs"].startswith("give gpus_per_node: as many as an autoscaler's nodes will have")


def test_gpus_are_looked_for_by_their_name(fit: Grounds) -> None:
    with advertised(fit.api, 4) as gpu:
        named = _examine(fit.namespace, "--gpu-resource", gpu)
        others = _examine(fit.namespace)
        many = _examine(fit.namespace, "--gpu-resource", gpu, "--gpus-per-node", "8")
    assert _of(named, "GPUs") == ("ok", f"4 {gpu}", "")
    state, said, remedy = _of(others, "GPUs")
    assert (state, said) == ("bad", f"4 {gpu}, and no nvidia.com/gpu")
    assert f'"gpu_resource": "{gpu}"' in remedy
    assert _of(many, "GPUs")[0] == "warn"


def test_a_quota_is_asked_by_what_argo_leaves_out_and_mended_by_its_remedy(
    cluster: client.ApiClient,
) -> None:
    with namespace(cluster, labels={"pod-security.kubernetes.io/enforce": "restricted"}) as ground:
        hard = {"requests.cpu": "8", "limits.memory": "64Gi"}
        quota = {"metadata": {"name": "compute"}, "spec": {"hard": hard}}
        ground.core.create_namespaced_resource_quota(ground.namespace, quota)
        before = _of(_examine(ground.namespace, *ON_CPUS), "pods of steps")
        _kubectl(*before[2].split()[1:])
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


def test_what_a_namespace_refuses_of_steps_and_of_workers_is_said(
    cluster: client.ApiClient,
) -> None:
    with namespace(cluster) as ground:
        limit = {"type": "Container", "max": {"memory": "1Gi"}}
        body = {"metadata": {"name": "low"}, "spec": {"limits": [limit]}}
        ground.core.create_namespaced_limit_range(ground.namespace, body)
        found = _examine(ground.namespace, *ON_CPUS)
    for what in ("pods of steps", "pods of workers"):
        state, said, remedy = _of(found, what)
        assert state == "bad"
        assert "maximum memory usage per Container is 1Gi" in said
        assert remedy


def _make(ground: Grounds, body: dict[str, Any]) -> None:
    make = {
        "Secret": ground.core.create_namespaced_secret,
        "PersistentVolumeClaim": ground.core.create_namespaced_persistent_volume_claim,
    }[body["kind"]]
    make(ground.namespace, body)
    name = body["metadata"]["name"]
    if body["kind"] == "Secret" or body["spec"].get("storageClassName"):
        return

    def bound() -> bool:
        found = ground.core.read_namespaced_persistent_volume_claim(name, ground.namespace)
        return bool(found.status.phase == "Bound")

    grounds.until(bound, f"{name} is bound", 60)


def _of(examined: tuple[int, list[dict[str, Any]]], what: str) -> tuple[str, str, str]:
    (found,) = (each for each in examined[1] if each["what"] == what)
    return found["state"], found["said"], found["remedy"]


def _kubectl(*arguments: str) -> None:
    done = subprocess.run(
        ["kubectl", *arguments], capture_output=True, text=True, timeout=60, cwd=DEPLOY.parent
    )
    assert done.returncode == 0, done.stderr


def _examine(space: str, *options: str, account: str = RUNNER) -> tuple[int, list[dict[str, Any]]]:
    command = [sys.executable, "-m", "kfp_ddp", "doctor", "--json"]
    done = subprocess.run(
        [*command, "--namespace", space, "--service-account", account, *options],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(DEPLOY).parent,
    )
    assert not done.stderr, done.stderr
    findings: list[dict[str, Any]] = json.loads(done.stdout)["findings"]
    return done.returncode, findings
