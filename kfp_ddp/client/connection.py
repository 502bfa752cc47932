"""Where the KFP API server is, and who asks it.

No model of pydantic, whose import is most of the time that a command's `--help` takes.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import kfp

T = TypeVar("T")
OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def setting(default: T, description: str, **more: str) -> T:
    """A field, with its text; `more` may name another environment variable that sets it."""
    return field(default=default, metadata={"description": description, **more})


@dataclass(frozen=True)
class Connection:
    """How to reach KFP; `kfp_ddp.config` reads it from flags, the environment and files."""

    host: str = setting(
        "",
        "Address of KFP, such as https://kubeflow.example.com/pipeline; empty for the service of "
        "the cluster that this runs in, or a port forwarded through the kubeconfig.",
        variable="KF_PIPELINES_ENDPOINT",
    )
    namespace: str = setting(
        "",
        "Namespace of the runs: your profile where KFP has several users; empty for the pod's own, "
        "or the kubeconfig's.",
    )
    kfp_namespace: str = setting("kubeflow", "Namespace that KFP itself runs in.")
    context: str = setting("", "Context of the kubeconfig; empty for the current one.")
    port_forward: bool = setting(
        False, "Reach KFP by a port forwarded through the kubeconfig, whatever host is set."
    )
    token_file: str = setting(
        "", "File with a token, read anew for each request; KFP_DDP_TOKEN holds one itself."
    )
    cookie_file: str = setting(
        "",
        "File with the cookie of a session, as in authservice_session=MTY1...; KFP_DDP_COOKIE "
        "holds one itself.",
    )
    username: str = setting("", "Who logs in at the Dex of a Kubeflow platform: an e-mail address.")
    password_file: str = setting("", "File with the password; KFP_DDP_PASSWORD holds one itself.")
    iap_client_id: str = setting(
        "",
        "Client of Google's Identity-Aware Proxy that stands before KFP.",
        variable="KF_PIPELINES_IAP_OAUTH2_CLIENT_ID",
    )
    ca_file: str = setting("", "File with the certificates to trust; empty for the usual ones.")
    ui: str = setting(
        "",
        "Address of the UI for links to runs; empty for the host.",
        variable="KF_PIPELINES_UI_ENDPOINT",
    )
    timeout: float = setting(30.0, "The longest wait for an answer, in seconds.")

    def run_page(self, run_id: str) -> str:
        """Address of a run in the UI; '' where none is known."""
        ui = self.ui or ("" if self.port_forward else self.host)
        return f"{ui.rstrip('/')}/#/runs/details/{run_id}" if ui else ""


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

    with contextlib.suppress(config.ConfigException):
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
    from kfp_ddp.base.errors import InputError

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
