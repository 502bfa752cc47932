"""Port forwards that a command begins and ends itself, to a KFP API server in a pod."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from kubernetes import client

from kfp_ddp.client.kfp.connection import open_client
from kfp_ddp.core.config import Connection
from kfp_ddp.core.errors import InputError, ServerError
from tests.e2e.harness.grounds import IMAGE, Grounds, until
from tests.e2e.harness.namespace import namespace
from tests.e2e.harness.programs import kfp_ddp

CHECKOUT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def grounds(cluster: client.ApiClient) -> Iterator[Grounds]:
    """A namespace with a server, and a service whose target is a named port of its pod."""
    with namespace(cluster) as ground:
        container = {
            "name": "server",
            "image": IMAGE,
            "command": ["python", "-m", "tests.kfp_server", "8888"],
            "workingDir": str(CHECKOUT),
            "env": [{"name": "PYTHONPATH", "value": str(CHECKOUT)}],
            "ports": [{"name": "api", "containerPort": 8888}],
            "readinessProbe": {
                "httpGet": {"path": "/apis/v2beta1/healthz", "port": "api"},
                "periodSeconds": 1,
            },
            "resources": {"requests": {"cpu": "50m"}},
        }
        pod = {
            "metadata": {"name": "ml-pipeline", "labels": {"app": "ml-pipeline"}},
            "spec": {"terminationGracePeriodSeconds": 1, "containers": [container]},
        }
        service = {
            "metadata": {"name": "ml-pipeline"},
            "spec": {
                "selector": {"app": "ml-pipeline"},
                "ports": [{"port": 8888, "targetPort": "api"}],
            },
        }
        ground.core.create_namespaced_service(ground.namespace, service)
        with pytest.raises(ServerError, match=r"no pod of service ml-pipeline .* is ready"):
            asked(ground)
        ground.core.create_namespaced_pod(ground.namespace, pod)
        until(lambda: ready(ground), "the server")
        yield ground


def asked(grounds: Grounds) -> str:
    """The version of the server that is reached."""
    with open_client(Connection(kfp_namespace=grounds.namespace)) as kfp:
        return str(kfp.version)


def ready(grounds: Grounds) -> bool:
    pod = grounds.core.read_namespaced_pod("ml-pipeline", grounds.namespace)
    return any(each.ready for each in pod.status.container_statuses or [])


def test_many_requests_go_through_one_forward(grounds: Grounds) -> None:
    connection = Connection(kfp_namespace=grounds.namespace, host="http://other", port_forward=True)
    with open_client(connection) as kfp:
        pipeline = kfp.upload_pipeline(str(CHECKOUT / "kfp_ddp/compiled/train_resnet.yaml"))
        for _ in range(5):
            assert kfp.get_pipeline(pipeline.pipeline_id).display_name == "train-resnet"


@pytest.mark.smoke
def test_a_command_ends_its_forward(grounds: Grounds, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["upload", "train_resnet", "--json", "--kfp-namespace", grounds.namespace]
    words += ["--registry", "registry.example.com/ml"]
    monkeypatch.delenv("KFP_DDP_HOST", raising=False)
    done = kfp_ddp(*words)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["pipeline"] == "train-resnet"
    assert done.stderr == ""


def test_a_namespace_without_kfp(grounds: Grounds) -> None:
    message = "ml-pipeline of namespace elsewhere not found"
    with (
        pytest.raises(InputError, match=message),
        open_client(Connection(kfp_namespace="elsewhere")),
    ):
        pass
