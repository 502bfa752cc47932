"""Connections to a KFP API server, also by a port forwarded through a kubeconfig."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kfp_ddp.core.config import Connection
from kfp_ddp.core.errors import InputError, ServerError
from kfp_ddp.k8s.api import NAMESPACE_FILE, Api, ApiError, Object, config_faults
from kfp_ddp.k8s.objects import condition
from kfp_ddp.k8s.resource import PODS, Resource

if TYPE_CHECKING:
    from kfp_ddp.client.kfp.compat import Client

SERVICE = "ml-pipeline"
PORT = 8888
BLOCK = 65536


@contextlib.contextmanager
def open_client(connection: Connection) -> "Iterator[Client]":
    """Yield a client of a server that answers; `client.multi_user` is true if it has profiles.

    Each request has a timeout. Each failure is one line: an InputError of the configuration, a
    RefusedError (with its `status`) of the server, or a ServerError without an answer.
    """
    from kfp_ddp.client.kfp import compat, login

    with contextlib.ExitStack() as stack:
        host = "" if connection.port_forward else connection.host
        from_outside = connection.port_forward or connection.context
        if host:
            host = compat.checked_host(host)
            server = host
        elif NAMESPACE_FILE.exists() and not from_outside:
            host = f"http://{SERVICE}.{connection.kfp_namespace}:{PORT}"
            server = host
        else:
            server = f"{SERVICE} of namespace {connection.kfp_namespace} (by a forwarded port)"
            forward = forwarded_port(connection.kfp_namespace, connection.context)
            host = stack.enter_context(forward)
        chosen = login.choose(connection, host)
        if chosen:
            login.check_private(host)
        client = compat.Client(host, connection.ca_file, server, connection.timeout, chosen)
        if client.multi_user:
            client.set_user_namespace(_profile(connection, server))
        yield client


def _profile(connection: Connection, server: str) -> str:
    """Return the namespace of the user; raise InputError if none is set."""
    namespace = connection.namespace or own_namespace(connection.context)
    if not namespace:
        raise InputError(
            f"KFP at {server} has several users: give --namespace, the one of your profile"
        )
    return namespace


def own_namespace(context: str = "") -> str:
    """Return the namespace of this pod, or of a kubeconfig's context; '' without either."""
    if NAMESPACE_FILE.exists() and not context:
        return NAMESPACE_FILE.read_text().strip()
    from kubernetes import config

    with contextlib.suppress(*config_faults()):
        contexts, current = config.list_kube_config_contexts()
        by_name = {entry["name"]: entry for entry in contexts}
        chosen: dict[str, Any] = by_name.get(context) or current
        return str(chosen["context"].get("namespace") or "")
    return ""


@contextlib.contextmanager
def forwarded_port(namespace: str, context: str = "") -> Iterator[str]:
    """Yield the local URL of a port that is forwarded to KFP's API server in a namespace.

    InputError: no kubeconfig, no such service, or no permission. ServerError: the cluster does not
    answer, or no pod is ready.
    """
    from kubernetes.client import CoreV1Api
    from kubernetes.stream import portforward

    try:
        api = Api.connect(namespace, context)
    except InputError as error:
        raise type(error)(
            f"no address of KFP is set, which this needs: give --host; {error}"
        ) from None
    try:
        service = _service(api, namespace)
        selector = ",".join(f"{key}={value}" for key, value in service["selector"].items())
        pods = api.list_objects(PODS, {"labelSelector": selector})
    except ApiError as error:
        kind = ServerError if error.transient else InputError
        raise kind(str(error)) from None
    pod = _ready_pod(pods)
    if pod is None:
        raise ServerError(f"no pod of service {SERVICE} in namespace {namespace} is ready")
    number = _container_port(service, pod)

    def connect() -> socket.socket:
        # A new client, since a stream changes its client while it connects.
        forward = CoreV1Api(api.another().client).connect_get_namespaced_pod_portforward
        stream = portforward(forward, pod["metadata"]["name"], namespace, ports=str(number))
        remote: socket.socket = stream.socket(number)
        remote.setblocking(True)
        return remote

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_accept, args=(listener, connect), daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


def _service(api: Api, namespace: str) -> Object:
    """Return the spec of KFP's service; raise InputError if no port of it can be forwarded."""
    title = f"service {SERVICE} of namespace {namespace}"
    service = api.get(Resource("v1", "services", role=""), SERVICE)
    if service is None:
        raise InputError(f"{title} not found: give --kfp-namespace, or the --host of KFP")
    spec: Object = service["spec"]
    if not spec.get("selector"):  # an ExternalName, or endpoints of one's own
        raise InputError(f"{title} selects no pods, so no port can be forwarded: give --host")
    if PORT not in {port["port"] for port in spec["ports"]}:
        raise InputError(f"{title} has no port {PORT}")
    return spec


def _ready_pod(pods: Sequence[Object]) -> Object | None:
    """Return a pod that is ready, and is not being deleted; None if there is none."""
    for pod in pods:
        deleted = pod["metadata"].get("deletionTimestamp")
        ready = condition(pod, "Ready")
        if ready and not deleted:
            return pod
    return None


def _container_port(service: Object, pod: Object) -> int:
    """Return the port of a pod to which a service sends what arrives at `PORT`."""
    targets = {port["port"]: port.get("targetPort") for port in service["ports"]}
    target = targets[PORT] or PORT
    for container in pod["spec"]["containers"]:
        ports = container.get("ports") or []
        for port in ports:
            if port.get("name") == target:  # the service may name its port
                return int(port["containerPort"])
    return int(target)


def _accept(listener: socket.socket, connect: Callable[[], socket.socket]) -> None:
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
