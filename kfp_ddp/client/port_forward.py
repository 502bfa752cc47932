"""Forwards a local port to a pod, through the API server of a kubeconfig."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

from kfp_ddp.core.errors import InputError, KfpDdpError, ServerError
from kfp_ddp.core.text import one_line
from kfp_ddp.k8s.api import config_faults

SECONDS = 10.0
BLOCK = 65536
Open = Callable[[], socket.socket]


@contextlib.contextmanager
def service(name: str, namespace: str, port: int, context: str = "") -> Iterator[str]:
    """Yield the local URL of a service's port.

    Args:
        name: Of the service.
        namespace: Of the service.
        port: Of the service.
        context: Of the kubeconfig; '' for the current one.

    Raises:
        InputError: there is no kubeconfig, no such service, or no permission.
        ServerError: the cluster does not answer, or no pod of the service is ready.
    """
    core = core_api(context)
    with _one_line_errors(f"service {name} of namespace {namespace}"):
        spec = core.read_namespaced_service(name, namespace, _request_timeout=SECONDS).spec
        targets = {one.port: one.target_port for one in spec.ports}
        if port not in targets:
            raise InputError(f"service {name} of namespace {namespace} has no port {port}")
        selector = ",".join(f"{key}={value}" for key, value in spec.selector.items())
        pods = core.list_namespaced_pod(
            namespace, label_selector=selector, _request_timeout=SECONDS
        ).items
    ready = [one for one in pods if _is_ready(one)]
    if not ready:
        raise ServerError(f"no pod of service {name} in namespace {namespace} is ready")
    target = _port_number(ready[0], targets[port] or port)
    with pod(core, namespace, ready[0].metadata.name, target) as local:
        yield f"http://127.0.0.1:{local}"


@contextlib.contextmanager
def pod(core: Any, namespace: str, name: str, port: int) -> Iterator[int]:
    """Yield the local port that is forwarded to a pod's.

    Args:
        core: From `core_api`.
        namespace: Of the pod.
        name: Of the pod.
        port: That the pod listens on.
    """
    from kubernetes.client import CoreV1Api
    from kubernetes.stream import portforward

    def connect() -> socket.socket:
        # A new client, since a stream changes its client while it connects.
        own = CoreV1Api(type(core.api_client)(core.api_client.configuration))
        forward = own.connect_get_namespaced_pod_portforward
        remote: socket.socket = portforward(forward, name, namespace, ports=str(port)).socket(port)
        remote.setblocking(True)
        return remote

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=_serve, args=(listener, connect), daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def core_api(context: str = "") -> Any:
    """Return the core API of the cluster of a kubeconfig.

    Raises:
        InputError: there is no kubeconfig, or it has no such context.
    """
    from kubernetes import client, config

    configuration = client.Configuration()
    try:
        config.load_kube_config(context=context or None, client_configuration=configuration)
    except config_faults() as error:
        raise InputError(
            f"no address of KFP is set and no port can be forwarded ({one_line(error)}): give "
            "--host, set KFP_DDP_HOST or a kubeconfig"
        ) from None
    configuration.retries = False
    return client.CoreV1Api(client.ApiClient(configuration))


def _serve(listener: socket.socket, connect: Open) -> None:
    with contextlib.suppress(OSError):  # the listener was closed
        while True:
            local, _ = listener.accept()
            threading.Thread(target=_join, args=(local, connect), daemon=True).start()


def _join(local: socket.socket, connect: Open) -> None:
    with local:
        try:
            remote = connect()
        except Exception:  # noqa: BLE001  the client sees its connection closed
            return
        with contextlib.closing(remote):  # kubernetes' socket is not a context manager
            answers = threading.Thread(target=_pump, args=(remote, local), daemon=True)
            answers.start()
            _pump(local, remote)
            answers.join()


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while block := source.recv(BLOCK):
            target.sendall(block)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def _is_ready(pod: Any) -> bool:
    conditions = {one.type: one.status for one in pod.status.conditions or []}
    return conditions.get("Ready") == "True" and not pod.metadata.deletion_timestamp


def _port_number(pod: Any, target: int | str) -> int:
    by_name = {
        port.name: port.container_port
        for container in pod.spec.containers
        for port in container.ports or []
    }
    return int(by_name.get(target, target))


@contextlib.contextmanager
def _one_line_errors(what: str) -> Iterator[None]:
    import urllib3
    from kubernetes.client import ApiException

    try:
        yield
    except ApiException as error:
        line: KfpDdpError = ServerError(f"the cluster failed to read {what} ({error.status})")
        if error.status == 404:
            line = InputError(f"{what} not found: give --kfp-namespace, or the --host of KFP")
        if error.status in (401, 403):
            line = InputError(f"this kubeconfig has no permission to read {what} ({error.status})")
        raise line from None
    except urllib3.exceptions.HTTPError as error:
        reason = getattr(error, "reason", None) or error
        raise ServerError(f"the cluster of the kubeconfig does not answer: {reason}") from None
