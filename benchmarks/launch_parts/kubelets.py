"""A stand-in for kubelets: nodes whose pods run nothing and end on command.

API server, scheduler and operator are real. Only what kubelets write is written here: nodes with
their leases, phases of pods, states of containers, and logs over TLS.
"""

import socket
import threading
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.launch_parts import kubelet_logs
from benchmarks.launch_parts.kubelet_logs import Logs
from kfp_ddp.k8s.api import Api, ApiError, Object, allowed
from kfp_ddp.k8s.resource import NODES, PODS, Resource
from kfp_ddp.k8s.watch_cache import WatchCache

LABEL = "kfp-ddp.test/stand-in"
LEASES = Resource("coordination.k8s.io/v1", "leases").path("kube-node-lease")
LEASE_SECONDS = 10.0
PODS_A_NODE = 64
THREADS = 8


class Kubelets:
    """Kubelets of one namespace. Every pod on their nodes runs immediately."""

    def __init__(self, api: Api, nodes: list[str], logs: Logs) -> None:
        self.api, self.nodes, self.logs = api, nodes, logs
        self.changed = threading.Event()
        self.watch = WatchCache(api, PODS, {}, self.changed)
        self.started: set[str] = set()
        """Uids of pods that run or ran."""
        self.stopped: set[str] = set()
        """Uids of deleted pods."""
        self.finished = threading.Event()
        self.workers = ThreadPoolExecutor(THREADS)

    def pods(self) -> dict[str, Object]:
        """Return the pods on these nodes, by name."""
        return {
            pod["metadata"]["name"]: pod
            for pod in self.watch.objects.values()
            if pod["spec"].get("nodeName") in self.nodes
        }

    def running(self) -> dict[str, str]:
        """Return the uids of running pods, by name."""
        return {
            name: str(pod["metadata"]["uid"])
            for name, pod in self.pods().items()
            if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]
        }

    def end(self, names: Iterable[str], code: int = 0, message: str = "", *lines: str) -> None:
        """Let pods write lines and end with an exit code, in this order."""
        pods = self.pods()

        def end_one(name: str) -> None:
            self.logs.write(name, *lines, end=True)
            self._patch(pods[name], _status(pods[name], code, message))

        list(self.workers.map(end_one, list(names)))

    def lose(self, pods: Iterable[str]) -> None:
        """Remove pods by force, as after the loss of a node."""
        for name in pods:
            self.logs.write(name, end=True)
            self._remove(name)

    def remove_all(self) -> None:
        """Remove all pods: without kubelets they would never end."""
        path, now = PODS.path(self.api.namespace), {"gracePeriodSeconds": 0}
        self.api.call("DELETE", path, now, seconds=120, retry=True)

    def work(self) -> None:
        """Run and stop pods until the end."""
        while not self.finished.is_set():
            self.changed.wait(1)
            self.changed.clear()
            for future in [self._handle(pod) for pod in self.pods().values()]:
                if future is not None:
                    future.result()

    def _handle(self, pod: Object) -> Any:
        uid, name = pod["metadata"]["uid"], pod["metadata"]["name"]
        if "deletionTimestamp" in pod["metadata"] and uid not in self.stopped:
            self.stopped.add(uid)
            return self.workers.submit(self._stop, pod)
        if pod["status"]["phase"] == "Pending" and uid not in self.started:
            self.started.add(uid)
            self.logs.forget(name)
            self.logs.write(name, f"{name} starts")
            return self.workers.submit(self._patch, pod, _status(pod))
        return None

    def _stop(self, pod: Object) -> None:
        name = pod["metadata"]["name"]
        self.logs.write(name, end=True)
        if pod["status"]["phase"] == "Running":
            self._patch(pod, _status(pod, 143))
        self._remove(name)

    def _remove(self, name: str) -> None:
        self.api.delete(PODS, name, {"gracePeriodSeconds": 0}, retry=False)

    def _patch(self, pod: Object, status: Object) -> None:
        path = f"{PODS.path(self.api.namespace, pod['metadata']['name'])}/status"
        try:
            self.api.call("PATCH", path, {"status": status}, retry=True)
        except ApiError as error:
            if error.status != 404:
                raise

    def renew_leases(self) -> None:
        """Renew the leases of the nodes until the end."""
        while not self.finished.wait(LEASE_SECONDS):
            for node in self.nodes:
                renewed = {"spec": {"renewTime": _now(6)}}
                self.api.call("PATCH", f"{LEASES}/{node}", renewed, retry=True)


@contextmanager
def run_kubelets(api: Api, nodes: int, folder: Path) -> Iterator[Kubelets]:
    """Yield kubelets of new nodes for the pods of a namespace, see `specification`."""
    address, mark = _address(api), uuid.uuid4().hex[:6]
    names = [f"stand-in-{mark}-{i}" for i in range(nodes)]
    with kubelet_logs.serve_logs(api, address, folder) as (logs, port):
        kubelets = Kubelets(api, names, logs)
        targets = kubelets.work, kubelets.renew_leases
        threads = [threading.Thread(target=target) for target in targets]
        try:
            for name in names:
                _make_node(api, name, address, port)
            kubelets.watch.start()
            for thread in threads:
                thread.start()
            yield kubelets
        finally:
            kubelets.finished.set()
            kubelets.watch.stop()
            kubelets.remove_all()
            for thread in filter(threading.Thread.is_alive, threads):
                thread.join()
            kubelets.workers.shutdown()
            for name in names:
                api.delete(NODES, name)
                api.call("DELETE", f"{LEASES}/{name}", retry=True)


def find_obstacle(api: Api) -> str:
    """Return in one line why stand-in kubelets cannot run here, or ''."""
    if not allowed(api, "create", NODES):
        return "this account may not create nodes, which stand-in kubelets need"
    address = _address(api)
    try:
        with socket.create_server((address, 0)):
            return ""
    except OSError as error:
        return f"no server can listen on the address of the nodes, {address}: {error}"


def _address(api: Api) -> str:
    """Return the address of a real node: that of this machine, beside the cluster."""
    (real, *_) = api.call("GET", "/api/v1/nodes", query={"limit": "1"})["items"]
    addresses = {item["type"]: str(item["address"]) for item in real["status"]["addresses"]}
    return addresses["InternalIP"]


def specification(namespace: str) -> dict[str, Any]:
    """Return the settings of a job whose pods run on the nodes of the kubelets."""
    toleration = {"key": LABEL, "operator": "Exists"}
    return {
        "node_selector": {LABEL: namespace},
        "tolerations": [toleration],
        "cpu_request": "20m",
        "memory_request": "16Mi",
        "shm_size": "",
    }


def _make_node(api: Api, name: str, address: str, port: int) -> None:
    labels = {LABEL: api.namespace, "kubernetes.io/hostname": name}
    taint = {"key": LABEL, "value": api.namespace, "effect": "NoSchedule"}
    body = {"metadata": {"name": name, "labels": labels}, "spec": {"taints": [taint]}}
    lease = {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": _now(6)}
    api.call("POST", LEASES, {"metadata": {"name": name}, "spec": lease})
    api.call("POST", "/api/v1/nodes", body)
    room = {"cpu": "64", "memory": "512Gi", "ephemeral-storage": "1Ti", "pods": str(PODS_A_NODE)}
    ready = {"type": "Ready", "status": "True", "reason": "StandIn", "lastHeartbeatTime": _now()}
    status = {
        "capacity": room,
        "allocatable": room,
        "conditions": [{**ready, "lastTransitionTime": _now()}],
        "addresses": [{"type": "InternalIP", "address": address}],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
    }
    api.call("PATCH", f"/api/v1/nodes/{name}/status", {"status": status})


def _status(pod: Object, code: int | None = None, message: str = "") -> Object:
    """Return the status of a pod whose containers run, or ended with a code."""
    start = pod["status"].get("startTime") or _now()
    state: Object = {"running": {"startedAt": start}}
    if code is not None:
        ended = {"startedAt": start, "finishedAt": _now(), "containerID": "stand-in://0"}
        reason = "Error" if code else "Completed"
        state = {"terminated": {**ended, "exitCode": code, "reason": reason, "message": message}}
    phase = "Running" if code is None else "Failed" if code else "Succeeded"
    statuses = [
        {
            "name": container["name"],
            "image": container["image"],
            "imageID": "",
            "ready": code is None,
            "restartCount": 0,
            "state": state,
        }
        for container in pod["spec"]["containers"]
    ]
    ready = {"type": "Ready", "status": str(code is None), "lastTransitionTime": _now()}
    # A merge replaces lists, and the condition of the scheduler is in one.
    scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": start}
    status = {"phase": phase, "conditions": [scheduled, ready], "startTime": start}
    return {**status, "containerStatuses": statuses}


def _now(digits: int = 0) -> str:
    now = datetime.now(UTC)
    return now.isoformat(timespec="microseconds" if digits else "seconds").replace("+00:00", "Z")
