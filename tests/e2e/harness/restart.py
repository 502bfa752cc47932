"""Kill the cluster's own API server and bring it back, as a node that loses power does.

Only a cluster of this machine has one that can be killed: its process id lies beside KUBECONFIG.
`KFP_DDP_CLUSTER` is the command that brings it up again.
"""

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import pytest
import urllib3
from kubernetes import client

from tests.e2e.harness.grounds import until

CHECKOUT = Path(__file__).parents[3]
COMMAND = os.environ.get("KFP_DDP_CLUSTER", str(CHECKOUT.parent / "shared/cluster/cluster"))
UP_SECONDS = 240.0


def restart_api_server(api: client.ApiClient) -> None:
    """Kill it, wait until it is gone, and return when all of the cluster is well again.

    A controller that lost its lease may wait minutes before it is started again, so pods that do
    are replaced.
    """
    process = _process()
    os.kill(process, signal.SIGKILL)
    until(lambda: not _is_alive(process), "the end of the API server", 60)
    up = subprocess.Popen([COMMAND, "up"], cwd=CHECKOUT, stdout=subprocess.DEVNULL)
    try:
        until(lambda: _well(api) and up.poll() is not None, "the cluster", UP_SECONDS)
    finally:
        if up.poll() is None:
            up.terminate()
    assert up.returncode == 0


def _is_alive(process: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False


def _process() -> int:
    state = Path(os.environ["KUBECONFIG"]).parents[1]
    file = state / "run" / "apiserver.pid"
    if not file.exists() or not os.access(COMMAND, os.X_OK):
        pytest.skip("the API server is not of this machine, or KFP_DDP_CLUSTER names no command")
    return int(file.read_text())


def _well(api: client.ApiClient) -> bool:
    """Whether every deployment has its pods ready; replaces those whose next start is put off."""
    core, apps = client.CoreV1Api(api), client.AppsV1Api(api)
    with contextlib.suppress(client.ApiException, urllib3.exceptions.HTTPError):
        for pod in core.list_pod_for_all_namespaces(_request_timeout=5).items:
            waiting = [s.state.waiting for s in pod.status.container_statuses or [] if s.state]
            if any(item and item.reason == "CrashLoopBackOff" for item in waiting):
                core.delete_namespaced_pod(pod.metadata.name, pod.metadata.namespace)
        result = apps.list_deployment_for_all_namespaces(_request_timeout=5).items
        return all((item.status.ready_replicas or 0) >= item.spec.replicas for item in result)
    return False
