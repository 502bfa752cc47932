"""The few calls to Kubernetes that publishing needs, and what their refusals mean."""

import os
from pathlib import Path
from typing import Any

from kfp_ddp.training.errors import InputError

_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def connect() -> "Any | None":
    """A client of the cluster this runs in; None outside of any."""
    if not os.environ.get("KUBERNETES_SERVICE_HOST"):
        return None
    from kubernetes import client, config

    configuration = client.Configuration()
    config.load_incluster_config(client_configuration=configuration)
    return client.ApiClient(configuration)


def namespace() -> str:
    """The namespace of the service account."""
    try:
        return _NAMESPACE.read_text().strip()
    except OSError as error:
        raise InputError(
            "no namespace is mounted for the service account; set automountServiceAccountToken"
        ) from error
