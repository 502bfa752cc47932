"""Forwards a local port to a pod of a service, through the API server of a kubeconfig."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

from kfp_ddp.core.errors import InputError, ServerError
from kfp_ddp.k8s.api import Api, ApiError, Object, core
from kfp_ddp.k8s.objects import condition

BLOCK = 65536


@contextlib.contextmanager
def service(name: str, namespace: str, port: int, context: str = "") -> Iterator[str]:
    """Yield the local URL of a service's port.

    Raises:
        InputError: there is no kubeconfig, no such service, or no permission.
        ServerError: the cluster does not answer, or no pod of the service is ready.
    """
    try:
        api = Api.connect(namespace, context)
    except InputError as error:
        raise InputError(
            f"no address of KFP is set, and no port can be forwarded: give --host; {error}"
        ) from None
    title = f"service {name} of namespace {namespace}"
    spec = _get(api, title, core(namespace, "services", name), {})["spec"]
    targets = {one["port"]: one.get("targetPort") or port for one in spec["ports"]}
    if port not in targets:
        raise InputError(f"{title} has no port {port}")
    selector = ",".join(f"{key}={value}" for key, value in spec["selector"].items())
    pods = _get(api, title, core(namespace, "pods"), {"labelSelector": selector})["items"]
    ready = [
        pod
        for pod in pods
        if condition(pod, "Ready") and not pod["metadata"].get("deletionTimestamp")
    ]
    if not ready:
        raise ServerError(f"no pod of service {name} in namespace {namespace} is ready")
    with _forwarded(api, ready[0], targets[port]) as local:
        yield f"http://127.0.0.1:{local}"


@contextlib.contextmanager
def _forwarded(api: Api, pod: Object, target: int | str) -> Iterator[int]:
    """Yield a local port that is forwarded to a port of a pod, given by number or name."""
    from kubernetes.client import CoreV1Api
    from kubernetes.stream import portforward

    declared = (port for one in pod["spec"]["containers"] for port in one.get("ports") or [])
    numbers = {port.get("name"): port["containerPort"] for port in declared}
    number = int(numbers.get(target, target))

    def connect() -> socket.socket:
        # A new client, since a stream changes its client while it connects.
        forward = CoreV1Api(api.another().client).connect_get_namespaced_pod_portforward
        stream = portforward(forward, pod["metadata"]["name"], api.namespace, ports=str(number))
        remote: socket.socket = stream.socket(number)
        remote.setblocking(True)
        return remote

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=_serve, args=(listener, connect), daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def _serve(listener: socket.socket, connect: Callable[[], socket.socket]) -> None:
    with contextlib.suppress(OSError):  # the listener was closed
        while True:
            local, _ = listener.accept()
            threading.Thread(target=_join, args=(local, connect), daemon=True).start()


def _join(local: socket.socket, connect: Callable[[], socket.socket]) -> None:
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


def _get(api: Api, title: str, path: str, query: dict[str, str]) -> Object:
    try:
        return api.call("GET", path, query=query)
    except ApiError as error:
        if error.status == 404:
            raise InputError(
                f"{title} not found: give --kfp-namespace, or the --host of KFP"
            ) from None
        if error.status in (401, 403):
            raise InputError(
                f"this kubeconfig has no permission to read {title} ({error.status})"
            ) from None
        raise ServerError(f"{title} cannot be read: {error.message}") from None
