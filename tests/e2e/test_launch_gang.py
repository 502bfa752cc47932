"""Gang scheduling is verified by the PodGroup that the operator creates or not.

Scheduler-plugins' PodGroups are served here, and no scheduler looks at them. With the default
scheduler as that of its gangs, the operator makes groups while pods run as ever.
"""

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes import client

from kfp_ddp.core.errors import InputError
from kfp_ddp.jobs.check_job import GANGS
from kfp_ddp.jobs.kinds import KINDS
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.jobs.run import launch
from kfp_ddp.k8s.api import Api
from tests.e2e.harness.grounds import IMAGE, UID, Grounds, until
from tests.e2e.harness.rights import act_as
from tests.e2e.harness.scene import namespace
from tests.e2e.harness.workflow import define_kind

OPERATOR, OPERATORS_NAMESPACE = "training-operator", "kubeflow"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
# Who defines a kind of Kubernetes' own groups names where that was agreed to.
AGREED = "https://github.com/kubernetes-sigs/scheduler-plugins/pull/50"


@pytest.fixture(scope="module")
def grounds(cluster: client.ApiClient) -> Iterator[Grounds]:
    """A namespace in a cluster that has the PodGroups of scheduler-plugins."""
    agreed = {"api-approved.kubernetes.io": AGREED}
    name = define_kind(cluster, GANGS["coscheduling"].group_version, "PodGroup", agreed)
    try:
        with namespace(cluster) as space:
            yield space
    finally:
        Api(cluster, "default").delete(f"{CRDS}/{name}")


@pytest.fixture
def ganging(cluster: client.ApiClient, grounds: Grounds) -> Iterator[None]:
    """The operator makes gangs, of the scheduler that every pod has anyway."""
    try:
        _restart_operator(cluster, ["--gang-scheduler-name=default-scheduler"])
        yield
    finally:
        _restart_operator(cluster, None)


def test_a_job_without_a_pod_group_is_deleted(grounds: Grounds) -> None:
    with act_as(grounds.api, grounds.namespace, grounds.service_account) as account:
        api = Api(account, grounds.namespace)
        with pytest.raises(InputError, match="created no PodGroup for PyTorchJob train-") as error:
            launched(api)
        assert "\n" not in str(error.value)
        assert api.call("GET", KINDS["pytorchjob"].path(api.namespace))["items"] == []


def test_job_with_a_pod_group_succeeds(grounds: Grounds, ganging: None) -> None:
    with act_as(grounds.api, grounds.namespace, grounds.service_account) as account:
        for kind in ("pytorchjob", "tfjob"):
            job = launched(Api(account, grounds.namespace), kind)
            name = job["metadata"]["name"]
            pods = grounds.core.list_namespaced_pod(
                grounds.namespace, label_selector=KINDS[kind].pod_selector(name)
            )
            marks = [pod.metadata.labels[GANGS["coscheduling"].mark] for pod in pods.items]
            assert marks == [name, name]


def launched(api: Api, kind: str = "pytorchjob") -> Any:
    """The job of two pods that end soon, as a gang."""
    spec = LaunchSpec.create(
        kind=kind,
        image=IMAGE,
        command=["python3", "-c", "import time; time.sleep(3)"],
        nodes=2,
        scheduler="coscheduling",
        run_as_user=UID,
        clean_pod_policy="None",
        retries=0,
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
