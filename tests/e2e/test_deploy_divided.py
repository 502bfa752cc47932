"""The two accounts of deploy/rbac/divided, with a network that tries what its pod may do."""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from kfp_ddp.core.container_images import REGISTRY
from kfp_ddp.k8s.api import LAUNCHER, LAUNCHER_DIR, STEPS, Api, review
from kfp_ddp.training.spec import model_file
from tests.e2e.harness import bucket, rights, workflow
from tests.e2e.harness.grounds import Grounds, until
from tests.e2e.harness.launch_step import LaunchStep, python
from tests.e2e.harness.namespace import namespace
from tests.e2e.harness.programs import kfp_ddp
from tests.e2e.harness.scene import Scene, make_scene
from tests.e2e.harness.training import TRAINING, WORKERS

OWN_MODEL = Path(__file__).parents[2] / "examples" / "own_model.py"
TOKENS = re.compile(r"ATTACK with tokens: (\d+)")
STRANGER = Path(__file__).with_name("harness") / "stranger.py"


@pytest.fixture
def divided(cluster: client.ApiClient, bucket_url: str, tmp_path: Path) -> Iterator[Scene]:
    """A namespace in which steps run as the account that may not launch."""
    place = {"STORAGE_EMULATOR_HOST": bucket_url}
    with make_scene(cluster, tmp_path, place, ours=False) as staging:
        yield dataclasses.replace(staging, grounds=divide(staging.grounds))


def divide(grounds: Grounds) -> Grounds:
    """Install the accounts as the command does; return grounds whose steps have the one."""
    options = ("--claims", "none", "--chown", "no", "--no-see-nodes", "--divide-accounts")
    where = ("-n", grounds.namespace, "--registry", REGISTRY)
    done = kfp_ddp("install", *where, "--json", *options)
    assert done.returncode == 0, done.stderr
    secret = (LAUNCHER, grounds.namespace)
    until(lambda: (grounds.core.read_namespaced_secret(*secret).data or {}).get("token"), "a token")
    return dataclasses.replace(grounds, service_account=STEPS)


@pytest.mark.smoke
def test_a_network_of_a_stranger_may_change_nothing(divided: Scene, tmp_path: Path) -> None:
    file = tmp_path / "network.py"
    file.write_text(STRANGER.read_text() + OWN_MODEL.read_text())
    training = {**TRAINING["training"], "model_code": model_file.pack(file)}
    run = divided.run(
        **TRAINING
        | {
            "model": "network.py:build",
            "epochs": 6,
            "training": training,
            "gate": {"min_accuracy": 0.1},
            "destination": f"gs://{bucket.MODELS}/divided",
        },
        backend="pytorchjob",
        job={**WORKERS, "nproc_per_node": 1},
    ).play()
    assert run.succeeded, run.explain()
    answers = {
        name: statuses
        for name, step in run.steps.items()
        if (statuses := re.findall(r"ATTACK (\d+) [A-Z]+ /", step.log))
    }
    assert answers.keys() == {"evaluate", "export"}, "no step with the launcher's token runs it"
    for statuses in answers.values():
        assert set(statuses) == {"403"}, run.explain()
    tokens = {name: TOKENS.findall(step.log) for name, step in run.steps.items()}
    assert set(tokens["train"]) == {"0"}, "the ranks have none"
    assert set(tokens["evaluate"]) == {"1"}, "the step's own, not the launcher's"


RIGHTS = {
    ("delete", "kubeflow.org", "pytorchjobs"): LAUNCHER,
    ("create", "trainer.kubeflow.org", "trainjobs"): LAUNCHER,
    ("create", "", "configmaps"): LAUNCHER,
    ("patch", "serving.kserve.io", "inferenceservices"): LAUNCHER,
    ("create", "", "persistentvolumeclaims"): LAUNCHER,
    ("list", "kubeflow.org", "pytorchjobs"): f"{LAUNCHER} {STEPS}",
    ("create", "argoproj.io", "workflowtaskresults"): f"{LAUNCHER} {STEPS}",
    ("create", "", "pods"): "",
    ("get", "", "secrets"): "",
}
"""Which accounts have a right."""


def test_the_account_that_launches_has_the_rest(cluster: client.ApiClient) -> None:
    with namespace(cluster, ours=False) as bare:
        grounds = divide(bare)
        for account in (LAUNCHER, STEPS):
            with rights.act_as(cluster, grounds.namespace, account) as acts:
                api = Api(acts, grounds.namespace)
                for right, accounts in RIGHTS.items():
                    assert review(api, *right) == (account in accounts.split()), (account, right)


@pytest.mark.parametrize("mounted", [True, False])
def test_only_a_step_with_the_token_launches(cluster: client.ApiClient, mounted: bool) -> None:
    workflow.define(cluster)
    with namespace(cluster, ours=False) as bare:
        step = LaunchStep(divide(bare), python("print('RAN')"))
        if mounted:
            mount(step.pod)
        ended = step.start().wait()
        assert (ended == "Succeeded") == mounted, step.log()
        assert (f"mount the secret {LAUNCHER}" in step.log()) != mounted
        assert len(step.jobs()) == mounted


def mount(pod: dict[str, Any]) -> None:
    """Mount the token as `kubernetes.use_secret_as_volume` does."""
    pod["spec"]["volumes"].append({"name": LAUNCHER, "secret": {"secretName": LAUNCHER}})
    (container,) = pod["spec"]["containers"]
    container["volumeMounts"].append({"name": LAUNCHER, "mountPath": LAUNCHER_DIR})
