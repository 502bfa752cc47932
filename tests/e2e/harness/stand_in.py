"""A stand-in for kubelets: nodes that are none, whose pods run nothing and end as a test says.

API server, scheduler and operator are real; only what a kubelet writes is written here: nodes with
their leases, the phases of pods and the states of their containers, and logs over TLS.
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

from kfp_ddp.k8s.api import Api, ApiError, Object, allowed, core
from kfp_ddp.k8s.watch_cache import WatchCache
from tests.e2e.harness import stand_in_logs
from tests.e2e.harness.stand_in_logs import Logs

LABEL = "kfp-ddp.test/stand-in"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
LEASE_SECONDS = 10.0
PODS_A_NODE = 64
AT_ONCE = 8


class Kubelets:
    """Kubelets of one namespace: every pod that the scheduler gives them runs at once."""

    def __init__(self, api: Api, nodes: list[str], logs: Logs) -> None:
        self.api, self.nodes, self.logs = api, nodes, logs
        self.changed = threading.Event()
        self.watch = WatchCache(api, core(api.namespace, "pods"), {}, self.changed)
        self.begun: set[str] = set()
        """The uids of pods that run or ran."""
        self.left: set[str] = set()
        """The uids of pods that were told to go, and went."""
        self.over = threading.Event()
        self.workers = ThreadPoolExecutor(AT_ONCE)

    def placed(self) -> dict[str, Object]:
        """Where the scheduler put pods: those of these nodes, by name."""
        every = self.watch.objects.values()
        return {
            pod["metadata"]["name"]: pod
            for pod in every
            if pod["spec"].get("nodeName") in self.nodes
        }

    def running(self) -> dict[str, str]:
        """The pods that the API server knows to run, uid by name."""
        return {
            name: str(pod["metadata"]["uid"])
            for name, pod in self.placed().items()
            if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]
        }

    def end(self, pods: Iterable[str], code: int = 0, message: str = "", *lines: str) -> None:
        """Let pods write these lines and end with that code, each as it is named."""
        there = self.placed()

        def one(name: str) -> None:
            self.logs.write(name, *lines, over=True)
            self._patch(there[name], _status(there[name], code, message))

        for _ in self.workers.map(one, list(pods)):
            pass

    def lose(self, pods: Iterable[str]) -> None:
        """Remove pods as with their node: by force, and without a word."""
        for name in pods:
            self.logs.write(name, over=True)
            self._remove(name)

    def leave(self) -> None:
        """Remove all pods, which nobody would end once their kubelets are gone."""
        path, now = core(self.api.namespace, "pods"), {"gracePeriodSeconds": 0}
        self.api.call("DELETE", path, now, seconds=120, retry=True)

    def work(self) -> None:
        """Do what a kubelet does, until it is over."""
        while not self.over.is_set():
            self.changed.wait(1)
            self.changed.clear()
            told = [self._look(pod) for pod in self.placed().values()]
            for each in told:
                if each is not None:
                    each.result()

    def _look(self, pod: Object) -> Any:
        uid, name = pod["metadata"]["uid"], pod["metadata"]["name"]
        if "deletionTimestamp" in pod["metadata"] and uid not in self.left:
            self.left.add(uid)
            return self.workers.submit(self._stop, pod)
        if pod["status"]["phase"] == "Pending" and uid not in self.begun:
            self.begun.add(uid)
            self.logs.forget(name)
            self.logs.write(name, f"{name} begins")
            return self.workers.submit(self._patch, pod, _status(pod))
        return None

    def _stop(self, pod: Object) -> None:
        name = pod["metadata"]["name"]
        self.logs.write(name, over=True)
        if pod["status"]["phase"] == "Running":
            self._patch(pod, _status(pod, 143))
        self._remove(name)

    def _remove(self, name: str) -> None:
        now = {"gracePeriodSeconds": 0}
        try:
            self.api.call("DELETE", core(self.api.namespace, "pods", name), now)
        except ApiError as error:
            if error.status != 404:
                raise

    def _patch(self, pod: Object, status: Object) -> None:
        path = f"{core(self.api.namespace, 'pods', pod['metadata']['name'])}/status"
        try:
            self.api.call("PATCH", path, {"status": status}, retry=True)
        except ApiError as error:
            if error.status != 404:
                raise

    def beat(self) -> None:
        """Renew the leases of the nodes, until it is over."""
        while not self.over.wait(LEASE_SECONDS):
            for node in self.nodes:
                renewed = {"spec": {"renewTime": _now(6)}}
                self.api.call("PATCH", f"{LEASES}/{node}", renewed, retry=True)


@contextmanager
def standing_in(api: Api, nodes: int, folder: Path) -> Iterator[Kubelets]:
    """So many nodes for the pods of a namespace that ask for them; see `asks_for`."""
    address, mark = _address(api), uuid.uuid4().hex[:6]
    names = [f"stand-in-{mark}-{i}" for i in range(nodes)]
    with stand_in_logs.serving(api, address, folder) as (logs, port):
        kubelets = Kubelets(api, names, logs)
        threads = [threading.Thread(target=each) for each in (kubelets.work, kubelets.beat)]
        try:
            for name in names:
                _make_node(api, name, address, port)
            kubelets.watch.start()
            for thread in threads:
                thread.start()
            yield kubelets
        finally:
            kubelets.over.set()
            kubelets.watch.stop()
            kubelets.leave()
            for thread in filter(threading.Thread.is_alive, threads):
                thread.join()
            kubelets.workers.shutdown()
            for name in names:
                api.delete(f"/api/v1/nodes/{name}")
                api.delete(f"{LEASES}/{name}")


def impossible(api: Api) -> str:
    """Why nothing can stand in for kubelets here, in one line; '' where it can."""
    if not allowed(api, "create", "", "nodes"):
        return "this account may not make nodes, on which a stand-in's pods would be"
    address = _address(api)
    try:
        with socket.create_server((address, 0)):
            return ""
    except OSError as error:
        return f"no server of ours is where the cluster's nodes are, at {address}: {error}"


def _address(api: Api) -> str:
    """The address of a real node, which is this machine's where commands run beside the cluster."""
    (real, *_) = api.call("GET", "/api/v1/nodes", query={"limit": "1"})["items"]
    addresses = {each["type"]: str(each["address"]) for each in real["status"]["addresses"]}
    return addresses["InternalIP"]


def asks_for(namespace: str) -> dict[str, Any]:
    """The part of a specification that brings a job's pods to the stand-in's nodes."""
    tolerated = {"key": LABEL, "operator": "Exists"}
    return {
        "node_selector": {LABEL: namespace},
        "tolerations": [tolerated],
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
    """The status of a pod whose containers run, or all ended with a code."""
    began = pod["status"].get("startTime") or _now()
    state: Object = {"running": {"startedAt": began}}
    if code is not None:
        ended = {"startedAt": began, "finishedAt": _now(), "containerID": "stand-in://0"}
        why = "Error" if code else "Completed"
        state = {"terminated": {**ended, "exitCode": code, "reason": why, "message": message}}
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
    # A merge replaces lists, and the scheduler's condition is one.
    placed = {"type": "PodScheduled", "status": "True", "lastTransitionTime": began}
    found = {"phase": phase, "conditions": [placed, ready], "startTime": began}
    return {**found, "containerStatuses": statuses}


def _now(digits: int = 0) -> str:
    now = datetime.now(UTC)
    return now.isoformat(timespec="microseconds" if digits else "seconds").replace("+00:00", "Z")
