"""A port of a pod on this machine, through the API server of a kubeconfig."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

from kfp_ddp.core.errors import InputError, KfpDdpError, ServerError
from kfp_ddp.core.text import one_line
from kfp_ddp.k8s.api import config_faults

SECONDS = 10.0
PIECE = 65536
Open = Callable[[], socket.socket]


@contextlib.contextmanager
def service(name: str, namespace: str, port: int, context: str = "") -> Iterator[str]:
    """The address of a service's port on this machine, for as long as the block runs.

    Args:
        name: Of the service.
        namespace: That it is in.
        port: The service's own.
        context: Of the kubeconfig; '' for the current one.

    Raises:
        InputError: there is no kubeconfig, no such service, or no right to it.
        ServerError: the cluster does not answer, or no pod of the service is ready.
    """
    core = core_api(context)
    with _errors(f"service {name} of namespace {namespace}"):
        found = core.read_namespaced_service(name, namespace, _request_timeout=SECONDS)
        targets = {each.port: each.target_port for each in found.spec.ports}
        if port not in targets:
            raise InputError(f"service {name} of namespace {namespace} has no port {port}")
        selector = ",".join(f"{key}={value}" for key, value in found.spec.selector.items())
        pods = core.list_namespaced_pod(
            namespace, label_selector=selector, _request_timeout=SECONDS
        ).items
    ready = [each for each in pods if _ready(each)]
    if not ready:
        raise ServerError(f"no pod of service {name} in namespace {namespace} is ready")
    target = _number(ready[0], targets[port] or port)
    with pod(core, namespace, ready[0].metadata.name, target) as local:
        yield f"http://127.0.0.1:{local}"


@contextlib.contextmanager
def pod(core: Any, namespace: str, name: str, port: int) -> Iterator[int]:
    """The port of this machine that leads to a pod's, for as long as the block runs.

    Args:
        core: As `core_api` gives it.
        namespace: Of the pod.
        name: Of the pod.
        port: That the pod listens on.
    """
    from kubernetes.client import CoreV1Api
    from kubernetes.stream import portforward

    def opened() -> socket.socket:
        # A client of its own: that of the stream is changed while it connects.
        own = CoreV1Api(type(core.api_client)(core.api_client.configuration))
        forward = own.connect_get_namespaced_pod_portforward
        found: socket.socket = portforward(forward, name, namespace, ports=str(port)).socket(port)
        found.setblocking(True)
        return found

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=_serve, args=(listening, opened), daemon=True)
        thread.start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)


def core_api(context: str = "") -> Any:
    """The core API of the cluster that a kubeconfig names.

    Raises:
        InputError: there is none, or it has no such context.
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


def _serve(listening: socket.socket, opened: Open) -> None:
    with contextlib.suppress(OSError):  # the block ended
        while True:
            here, _ = listening.accept()
            threading.Thread(target=_join, args=(here, opened), daemon=True).start()


def _join(here: socket.socket, opened: Open) -> None:
    with here:
        try:
            there = opened()
        except Exception:  # noqa: BLE001  whoever connected sees the connection end
            return
        with contextlib.closing(there):  # no whole socket: it is none that `with` takes
            answers = threading.Thread(target=_pump, args=(there, here), daemon=True)
            answers.start()
            _pump(here, there)
            answers.join()


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while piece := source.recv(PIECE):
            target.sendall(piece)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def _ready(found: Any) -> bool:
    conditions = {each.type: each.status for each in found.status.conditions or []}
    return conditions.get("Ready") == "True" and not found.metadata.deletion_timestamp


def _number(found: Any, target: int | str) -> int:
    named = {
        each.name: each.container_port
        for container in found.spec.containers
        for each in container.ports or []
    }
    return int(named.get(target, target))


@contextlib.contextmanager
def _errors(what: str) -> Iterator[None]:
    import urllib3
    from kubernetes.client import ApiException

    try:
        yield
    except ApiException as error:
        line: KfpDdpError = ServerError(f"the cluster fails at {what} ({error.status})")
        if error.status == 404:
            line = InputError(f"there is no {what}: give --kfp-namespace, or the --host of KFP")
        if error.status in (401, 403):
            line = InputError(f"this kubeconfig may not read {what} ({error.status})")
        raise line from None
    except urllib3.exceptions.HTTPError as error:
        reason = getattr(error, "reason", None) or error
        raise ServerError(f"the cluster of the kubeconfig does not answer: {reason}") from None
