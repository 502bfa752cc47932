"""A connection to the KFP API server, and what it needs of this machine."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kfp_ddp.core.config import Connection

if TYPE_CHECKING:
    import kfp

OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


@contextlib.contextmanager
def open_client(connection: Connection) -> "Iterator[kfp.Client]":
    """A client that has reached the server; `client.multi_user` says whether it knows users.

    Inside, each request has a time-out, and each failure is a RefusedError (with its `status`) or
    a ServerError of one line.

    Raises:
        InputError: no server is set, or the login cannot be used.
        RefusedError: the server refuses this login.
        ServerError: there is no answer.
    """
    from kfp_ddp.client import login, port_forward, transport

    with contextlib.ExitStack() as stack:
        host = "" if connection.port_forward else connection.host
        if host:
            host = place = transport.checked_host(host)
        elif OWN_NAMESPACE.exists() and not connection.port_forward:
            host = place = f"http://ml-pipeline.{connection.kfp_namespace}:8888"
        else:
            place = f"ml-pipeline of namespace {connection.kfp_namespace} (by a forwarded port)"
            host = stack.enter_context(
                port_forward.service(
                    "ml-pipeline", connection.kfp_namespace, 8888, connection.context
                )
            )
        who = login.find(connection, host)
        yield transport.Client(connection, host, place, who)


def own_namespace(context: str = "") -> str:
    """Namespace of the pod that this runs in, or of the kubeconfig's context; '' without either."""
    if OWN_NAMESPACE.exists():
        return OWN_NAMESPACE.read_text().strip()
    from kubernetes import config

    from kfp_ddp.k8s.api import config_faults

    with contextlib.suppress(*config_faults()):
        contexts, current = config.list_kube_config_contexts()
        named = {each["name"]: each for each in contexts}
        found: dict[str, Any] = named.get(context) or current
        return str(found["context"].get("namespace", ""))
    return ""


def secret_of(variable: str, path: str) -> str:
    """What an environment variable or a file holds; '' where neither is set.

    Raises:
        InputError: the file cannot be read, or is empty.
    """
    from kfp_ddp.core.errors import InputError

    if not path:
        return os.environ.get(variable, "")
    try:
        found = Path(path).expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise InputError(f"cannot read {path}: {reason}") from None
    if not found:
        raise InputError(f"{path} is empty: it should hold what {variable} would")
    return found
