"""Gangs of the scheduler of scheduler-plugins, by the PodGroup that the operator creates or not."""

import contextlib
import json
import os
import re
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from kubernetes import client

from kfp_ddp.core.errors import InputError, JobError
from kfp_ddp.jobs.gangs import GANGS
from kfp_ddp.jobs.kinds import KINDS
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.jobs.run import launch
from kfp_ddp.k8s.api import Api
from kfp_ddp.k8s.resource import Resource
from tests.e2e.harness.grounds import IMAGE, UID, Grounds, until
from tests.e2e.harness.namespace import namespace
from tests.e2e.harness.rights import act_as
from tests.e2e.harness.workflow import establish
from tests.serving import free_port
from tests.stores import coscheduler, running

pytestmark = pytest.mark.slow
OPERATOR, OPERATORS_NAMESPACE = "training-operator", "kubeflow"
CRDS = Resource("apiextensions.k8s.io/v1", "customresourcedefinitions", namespaced=False)
NAME = "coscheduling"
RIGHTS = ("authentication", "authorization")
PLUGIN = {"name": "Coscheduling"}
CONFIG = {
    "apiVersion": "kubescheduler.config.k8s.io/v1",
    "kind": "KubeSchedulerConfiguration",
    "leaderElection": {"leaderElect": False},
    "profiles": [
        {
            "schedulerName": NAME,
            "plugins": {
                "multiPoint": {"enabled": [PLUGIN]},
                "queueSort": {"enabled": [PLUGIN], "disabled": [{"name": "*"}]},
            },
        }
    ],
}


@pytest.fixture(scope="module")
def grounds(
    cluster: client.ApiClient, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Grounds]:
    """A namespace in a cluster with the scheduler and its PodGroups."""
    program, definition = coscheduler()
    folder, kubeconfig = tmp_path_factory.mktemp("scheduler"), os.environ["KUBECONFIG"]
    file, port = folder / "config.yaml", free_port()
    file.write_text(json.dumps({**CONFIG, "clientConnection": {"kubeconfig": kubeconfig}}))
    command = [str(program), f"--config={file}", f"--secure-port={port}"]
    command += [f"--{right}-kubeconfig={kubeconfig}" for right in RIGHTS]
    ready = re.compile(r"(Serving securely)")
    with contextlib.ExitStack() as stack:
        kind = yaml.safe_load(definition.read_text())
        establish(cluster, kind)
        stack.callback(Api(cluster, "default").delete, CRDS, kind["metadata"]["name"])
        stack.enter_context(running(command, folder / "log", ready))
        yield stack.enter_context(namespace(cluster))


@pytest.fixture
def ganging(cluster: client.ApiClient, grounds: Grounds) -> Iterator[None]:
    """The operator makes gangs."""
    try:
        _restart_operator(cluster, [f"--gang-scheduler-name={NAME}"])
        yield
    finally:
        _restart_operator(cluster, None)


def test_a_job_without_a_pod_group_is_deleted(grounds: Grounds) -> None:
    with act_as(grounds.api, grounds.namespace, grounds.service_account) as account:
        api = Api(account, grounds.namespace)
        with pytest.raises(InputError, match="created no PodGroup for PyTorchJob train-") as error:
            launched(api)
        assert "\n" not in str(error.value)
        assert api.list_objects(KINDS["pytorchjob"].resource) == []


def test_job_with_a_pod_group_succeeds(grounds: Grounds, ganging: None) -> None:
    with act_as(grounds.api, grounds.namespace, grounds.service_account) as account:
        for kind in ("pytorchjob", "tfjob"):
            job = launched(Api(account, grounds.namespace), kind)
            name = job["metadata"]["name"]
            pods = grounds.core.list_namespaced_pod(
                grounds.namespace, label_selector=KINDS[kind].pod_selector(name)
            )
            marks = [pod.metadata.labels[GANGS[NAME].pod_key] for pod in pods.items]
            assert marks == [name, name]
            assert {pod.spec.scheduler_name for pod in pods.items} == {NAME}


def test_no_pod_of_a_gang_that_does_not_fit_gets_a_node(grounds: Grounds, ganging: None) -> None:
    """One of the pods would fit."""
    with act_as(grounds.api, grounds.namespace, grounds.service_account) as account:
        api = Api(account, grounds.namespace)
        with pytest.raises(JobError, match="not enough cpu free for all pods at once"):
            launched(api, cpu_request="1200m", pending_minutes=0.2)
    events = grounds.core.list_namespaced_event(grounds.namespace).items
    waiting = {event.involved_object.name for event in events if event.reason == "FailedScheduling"}
    placed = {event.involved_object.name for event in events if event.reason == "Scheduled"}
    assert len(waiting - placed) == 2


def launched(api: Api, kind: str = "pytorchjob", **more: Any) -> Any:
    """The job of two pods that end soon, as a gang."""
    spec = LaunchSpec.create(
        kind=kind,
        image=IMAGE,
        command=["python3", "-c", "import time; time.sleep(3)"],
        nodes=2,
        scheduler=NAME,
        run_as_user=UID,
        clean_pod_policy="None",
        retries=0,
        **more,
    )
    return launch(spec, str(uuid.uuid4()), "train", "", api).job


def _restart_operator(api: client.ApiClient, arguments: list[str] | None) -> None:
    """Give the operator these arguments, and wait until no other is left."""
    apps = client.AppsV1Api(api)
    container = {"name": OPERATOR, "args": arguments}
    body = {"spec": {"template": {"spec": {"containers": [container]}}}}
    apps.patch_namespaced_deployment(OPERATOR, OPERATORS_NAMESPACE, body)

    def alone() -> bool:
        result = apps.read_namespaced_deployment(OPERATOR, OPERATORS_NAMESPACE)
        status = result.status
        counts = (status.replicas, status.updated_replicas, status.available_replicas)
        return status.observed_generation == result.metadata.generation and counts == (1, 1, 1)

    until(alone, "the operator")
