"""How far a training is, from the log of a step's pod; and why a pod waits."""

from collections.abc import Callable, Iterator

import pytest
from kubernetes import client

from kfp_ddp.client import follow
from kfp_ddp.client.steps import Step
from kfp_ddp.core.config import Connection
from tests.e2e.harness.grounds import IMAGE, Grounds, until
from tests.e2e.harness.scene import namespace

pytestmark = pytest.mark.smoke

RUN, WORKFLOW = "8fa2b9a1-6d87-4473-ad43-69c2efa3bcc0", "train-resnet-pxrp4"
SAID = (
    "print('[rank0]:step 5/90: loss 2.1, 500 images/s'); "
    "print('2026-11-22T10:00:00Z step 5/90 · loss 2.103 · 500 images/s · ETA 0:17'); "
    "print('saved'); import time; time.sleep(600)"
)


@pytest.fixture(scope="module")
def grounds(cluster: client.ApiClient) -> Iterator[Grounds]:
    """A namespace with a pod of a step that trains, and one that no node can take."""
    with namespace(cluster) as ground:
        for number, cpu in (("1", "10m"), ("2", "500")):
            body = {
                "metadata": {
                    "name": f"{WORKFLOW}-system-container-impl-{number}",
                    "labels": {"pipeline/runid": RUN},
                },
                "spec": {
                    "restartPolicy": "Never",
                    "terminationGracePeriodSeconds": 0,
                    "containers": [
                        {
                            "name": "main",
                            "image": IMAGE,
                            "command": ["python3", "-u", "-c", SAID],
                            "resources": {"requests": {"cpu": cpu}},
                        }
                    ],
                },
            }
            ground.core.create_namespaced_pod(ground.namespace, body)
        yield ground


def _becomes(
    grounds: Grounds, monkeypatch: pytest.MonkeyPatch, number: str, told: Callable[[str], bool]
) -> None:
    monkeypatch.setattr(follow, "PROGRESS_SECONDS", 0.0)
    look = follow.Progress(Connection(namespace=grounds.namespace), RUN)
    step = Step("train", "train", "RUNNING", pods=(f"{WORKFLOW}-{number}",))
    until(lambda: told(look(step)), f"the line of pod {number}")


def test_the_newest_line_of_a_training_is_told(
    grounds: Grounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = "step 5/90 · loss 2.103 · 500 images/s · ETA 0:17"
    _becomes(grounds, monkeypatch, "1", lambda told: told == line)


def test_it_is_told_what_a_pod_waits_for(grounds: Grounds, monkeypatch: pytest.MonkeyPatch) -> None:
    _becomes(grounds, monkeypatch, "2", lambda told: "Insufficient cpu" in told)


def test_where_no_cluster_is_configured_nothing_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setenv("KUBECONFIG", f"{tmp_path}/none")
    look = follow.Progress(Connection(), RUN)
    assert look(Step("train", "train", "RUNNING", pods=("a-1",))) == ""
