"""Connections to a KFP API server."""

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kfp_ddp.core.config import Connection
from kfp_ddp.core.errors import InputError
from kfp_ddp.k8s.api import NAMESPACE_FILE, config_faults

if TYPE_CHECKING:
    from kfp_ddp.client.compat import Client


@contextlib.contextmanager
def open_client(connection: Connection) -> "Iterator[Client]":
    """Yield a client of a server that answers; `client.multi_user` is true if it has profiles.

    Each request has a timeout. Each failure is a RefusedError (with its `status`) or a
    ServerError of one line.

    Raises:
        InputError: no server is configured, or the login is invalid.
        RefusedError: the server refuses this login.
        ServerError: no answer.
    """
    from kfp_ddp.client import compat, login, port_forward, transport

    if connection.untrusted:
        raise InputError(connection.untrusted)
    with contextlib.ExitStack() as stack:
        host = "" if connection.port_forward else connection.host
        if host:
            host = server = transport.checked_host(host)
        elif NAMESPACE_FILE.exists() and not connection.port_forward:
            host = server = f"http://ml-pipeline.{connection.kfp_namespace}:8888"
        else:
            server = f"ml-pipeline of namespace {connection.kfp_namespace} (by a forwarded port)"
            host = stack.enter_context(
                port_forward.service(
                    "ml-pipeline", connection.kfp_namespace, 8888, connection.context
                )
            )
        chosen = login.choose(connection, host)
        if chosen:
            login.check_private(host)
        rest_client = functools.partial(
            transport.Transport, server=server, seconds=connection.timeout, login=chosen
        )
        client = compat.Client(host, transport.checked_ca_file(connection.ca_file), rest_client)
        if client.multi_user:
            client.set_user_namespace(_profile(connection, server))
        yield client


def own_namespace(context: str = "") -> str:
    """Return the namespace of this pod, or of the kubeconfig's context; '' without either."""
    if NAMESPACE_FILE.exists():
        return NAMESPACE_FILE.read_text().strip()
    from kubernetes import config

    with contextlib.suppress(*config_faults()):
        contexts, current = config.list_kube_config_contexts()
        by_name = {one["name"]: one for one in contexts}
        chosen: dict[str, Any] = by_name.get(context) or current
        return str(chosen["context"].get("namespace", ""))
    return ""


def _profile(connection: Connection, server: str) -> str:
    namespace = connection.namespace or own_namespace(connection.context)
    if not namespace:
        raise InputError(
            f"KFP at {server} has several users: give --namespace, the one of your profile"
        )
    return namespace
