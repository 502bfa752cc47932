"""Queues of the real Kueue: a quota of CPU, a LocalQueue on it, and other workloads in it."""

import contextlib
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kubernetes import client

from kfp_ddp.k8s.api import Api, Object
from kfp_ddp.k8s.objects import condition
from kfp_ddp.k8s.resource import Resource
from tests.e2e.harness.grounds import IMAGE, UID, Grounds, until, with_retries

GROUP, GROUP_VERSION = "kueue.x-k8s.io", "kueue.x-k8s.io/v1beta1"
LOCAL_QUEUES = Resource(GROUP_VERSION, "localqueues")
WORKLOADS = Resource(GROUP_VERSION, "workloads")
CLUSTER_QUEUES = Resource(GROUP_VERSION, "clusterqueues", namespaced=False)
FLAVORS = Resource(GROUP_VERSION, "resourceflavors", namespaced=False)
PRIORITIES = Resource(GROUP_VERSION, "workloadpriorityclasses", namespaced=False)
QUEUE = "kueue.x-k8s.io/queue-name"
PRIORITY = "kueue.x-k8s.io/priority-class"


def served(api: client.ApiClient) -> bool:
    """Whether the cluster has Kueue."""
    groups = with_retries(lambda: client.ApisApi(api).get_api_versions()).groups
    return any(group.name == GROUP for group in groups)


@dataclass(frozen=True)
class Queue:
    """A LocalQueue alone on its ClusterQueue; `urgent` names a WorkloadPriorityClass above 0."""

    grounds: Grounds
    name: str
    cluster_queue: str
    urgent: str

    def set_quota(self, cpu: str) -> None:
        """Give the queue another quota."""
        spec = _spec(self.grounds, self.cluster_queue, cpu)
        self._api().patch(CLUSTER_QUEUES, self.cluster_queue, {"spec": spec}, retry=True)

    def stop(self) -> None:
        """Let the queue admit nothing more."""
        self._api().patch(LOCAL_QUEUES, self.name, {"spec": {"stopPolicy": "Hold"}}, retry=True)

    def _api(self) -> Api:
        return Api(self.grounds.api, self.grounds.namespace)

    @contextmanager
    def use_quota(self, cpu: str, *, urgent: bool = False) -> Iterator[str]:
        """Let another workload hold that much of the quota while the block lasts; its name."""
        name = f"other-{uuid.uuid4().hex[:5]}"
        labels = {QUEUE: self.name} | ({PRIORITY: self.urgent} if urgent else {})
        container = dict[str, Any](
            name="main", image=IMAGE, command=["sleep", "600"], resources={"requests": {"cpu": cpu}}
        )
        pod = {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 0,
            "securityContext": {"runAsUser": UID},
            "containers": [container],
        }
        body = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": name, "labels": labels},
            "spec": {"suspend": True, "template": {"spec": pod}},
        }
        batch = client.BatchV1Api(self.grounds.api)
        with_retries(lambda: batch.create_namespaced_job(self.grounds.namespace, body))

        def admitted() -> bool:
            result = with_retries(lambda: batch.read_namespaced_job(name, self.grounds.namespace))
            return not result.spec.suspend

        try:
            until(admitted, f"the admission of {name}", 60)
            yield name
        finally:
            with contextlib.suppress(client.ApiException):
                batch.delete_namespaced_job(
                    name, self.grounds.namespace, propagation_policy="Background"
                )

    def waiting(self) -> list[str]:
        """Names of the workloads that the queue has not let in."""
        own = self._workloads()
        return [item["metadata"]["name"] for item in own if not condition(item, "QuotaReserved")]

    def reasons(self) -> list[str]:
        """What Kueue says of each workload that it has not let in."""
        pending = [condition(item, "QuotaReserved", "False") for item in self._workloads()]
        return [item["message"] for item in pending if item and item.get("message")]

    def _workloads(self) -> list[Object]:
        result = self._api().list_objects(WORKLOADS, retry=True)
        return [item for item in result if item["spec"].get("queueName") == self.name]


@contextmanager
def queue(grounds: Grounds, cpu: str, name: str = "") -> Iterator[Queue]:
    """Make a queue with that much CPU; what is more urgent preempts what is less."""
    mark = uuid.uuid4().hex[:5]
    name = name or f"team-{mark}"
    created = Queue(grounds, name, f"{grounds.namespace}-{mark}", f"urgent-{mark}")
    cluster_queue = created.cluster_queue
    spec = {"spec": _spec(grounds, cluster_queue, cpu)}
    local = {"spec": {"clusterQueue": cluster_queue}}
    objects: tuple[tuple[Resource, str, str, Object], ...] = (
        (FLAVORS, "ResourceFlavor", cluster_queue, {}),
        (CLUSTER_QUEUES, "ClusterQueue", cluster_queue, spec),
        (PRIORITIES, "WorkloadPriorityClass", created.urgent, {"value": 99}),
        (LOCAL_QUEUES, "LocalQueue", created.name, local),
    )
    api = Api(grounds.api, grounds.namespace)
    with contextlib.ExitStack() as stack:
        for resource, kind, name, content in objects:
            head = {"apiVersion": GROUP_VERSION, "kind": kind, "metadata": {"name": name}}
            api.create(resource, {**head, **content})
            stack.callback(api.delete, resource, name)
        yield created


def _spec(grounds: Grounds, flavor: str, cpu: str) -> dict[str, Any]:
    resources = [{"name": "cpu", "nominalQuota": cpu}, {"name": "memory", "nominalQuota": "100Gi"}]
    flavors = [{"name": flavor, "resources": resources}]
    return {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": grounds.namespace}},
        "resourceGroups": [{"coveredResources": ["cpu", "memory"], "flavors": flavors}],
        "preemption": {"withinClusterQueue": "LowerPriority"},
    }
