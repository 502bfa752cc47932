"""`kfp-ddp doctor` on a namespace with our rights, and on one with KFP's stock rights alone."""

import json
import subprocess
import sys
from typing import Any

from kubernetes import client

from tests.e2e.harness import queues
from tests.e2e.harness.rights import RUNNER
from tests.e2e.harness.scene import namespace


def test_with_the_rights_of_deploy_nothing_is_missing(cluster: client.ApiClient) -> None:
    with namespace(cluster) as ground:
        code, found = _examine(ground.namespace)
    assert [each for each in found if each["state"] == "bad"] == []
    assert code == 0
    whole = " ".join(f"{each['what']} {each['said']}" for each in found)
    for part in ("1.36", "pytorchjobs", "trainjobs", "standard"):
        assert part in whole, found
    kinds = {each["what"] for each in found if each["state"] == "ok"}
    assert {"PyTorchJob", "TrainJob", "TFJob", "MPIJob"} <= kinds
    assert all(each["remedy"] for each in found if each["state"] != "ok"), found


def test_without_them_each_missing_right_is_a_line_with_its_remedy(
    cluster: client.ApiClient,
) -> None:
    """KFP's stock rights are enough for PyTorchJobs, so what they lack is a warning."""
    with namespace(cluster, ours=False) as ground:
        code, found = _examine(ground.namespace)
    lacking = [each for each in found if "no right" in each["said"]]
    assert code == 0
    of_queues = {"localqueues", "workloads"} if queues.served(cluster) else set()
    assert {each["what"].rpartition(" ")[2] for each in lacking} == {
        "trainjobs",
        "events",
        "configmaps",
        *of_queues,
    }
    for each in lacking:
        assert "\n" not in each["said"]
        assert "deploy/rbac" in each["remedy"]


def test_an_account_that_may_do_nothing_fails_the_check(cluster: client.ApiClient) -> None:
    with namespace(cluster) as ground:
        code, found = _examine(ground.namespace, "default")
    assert code == 1
    assert any(each["state"] == "bad" and "pytorchjobs" in each["what"] for each in found), found


def _examine(space: str, account: str = RUNNER) -> tuple[int, list[dict[str, Any]]]:
    command = [sys.executable, "-m", "kfp_ddp.cli", "doctor", "--json"]
    done = subprocess.run(
        [*command, "--namespace", space, "--service-account", account],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert not done.stderr, done.stderr
    findings: list[dict[str, Any]] = json.loads(done.stdout)["findings"]
    return done.returncode, findings
