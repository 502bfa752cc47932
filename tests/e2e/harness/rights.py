"""The rights of the account that KFP's steps run under: its stock Role, and what deploy/ adds."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from kubernetes import client

DEPLOY = Path(__file__).parents[3] / "deploy"
RUNNER = "pipeline-runner"

# Role `pipeline-runner` of kubeflow/pipelines 2.17.0, without what is not in this cluster.
STOCK: list[dict[str, list[str]]] = [
    {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]},
    {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["get", "watch", "list"]},
    {
        "apiGroups": [""],
        "resources": ["persistentvolumes", "persistentvolumeclaims"],
        "verbs": ["*"],
    },
    {
        "apiGroups": ["snapshot.storage.k8s.io"],
        "resources": ["volumesnapshots"],
        "verbs": ["create", "delete", "get"],
    },
    {
        "apiGroups": ["argoproj.io"],
        "resources": ["workflows"],
        "verbs": ["get", "list", "watch", "update", "patch"],
    },
    {"apiGroups": [""], "resources": ["pods", "pods/exec", "pods/log", "services"], "verbs": ["*"]},
    {
        "apiGroups": ["", "apps", "extensions"],
        "resources": ["deployments", "replicasets"],
        "verbs": ["*"],
    },
    {"apiGroups": ["kubeflow.org"], "resources": ["*"], "verbs": ["*"]},
    {"apiGroups": ["batch"], "resources": ["jobs"], "verbs": ["*"]},
]


def grant(api: client.ApiClient, namespace: str, *, ours: bool = True) -> str:
    """Make the account with the stock Role and, if `ours`, the Roles in deploy/; its name."""
    client.CoreV1Api(api).create_namespaced_service_account(
        namespace, {"metadata": {"name": RUNNER}}
    )
    bind(api, namespace, RUNNER, STOCK)
    if ours:
        for role in _roles():
            bind(api, namespace, role["metadata"]["name"], role["rules"])
    return RUNNER


def _roles() -> list[dict[str, Any]]:
    documents = [
        document
        for folder in ("rbac", "storage")  # the others are of people
        for file in sorted((DEPLOY / folder).rglob("*.yaml"))
        for document in yaml.safe_load_all(file.read_text())
    ]
    return [d for d in documents if d and d.get("kind") == "Role"]


@contextmanager
def act_as(api: client.ApiClient, namespace: str, account: str) -> Iterator[client.ApiClient]:
    """Yield a client that acts as an account of the namespace."""
    with client.ApiClient(configured(api, namespace, account)) as acts:
        yield acts


def configured(api: client.ApiClient, namespace: str, account: str) -> client.Configuration:
    """Return the configuration of a client with an account's own token, valid for an hour."""
    body = {"spec": {"expirationSeconds": 3600}}
    core = client.CoreV1Api(api)
    created = core.create_namespaced_service_account_token(account, namespace, body)
    configuration = client.Configuration()
    configuration.host = api.configuration.host
    configuration.ssl_ca_cert = api.configuration.ssl_ca_cert
    configuration.api_key = {"authorization": f"Bearer {created.status.token}"}
    return configuration


def bind(
    api: client.ApiClient,
    namespace: str,
    name: str,
    rules: list[dict[str, list[str]]],
    account: str = RUNNER,
) -> None:
    """Give the account the rules, as a Role of that name."""
    rbac = client.RbacAuthorizationV1Api(api)
    rbac.create_namespaced_role(namespace, {"metadata": {"name": name}, "rules": rules})
    rbac.create_namespaced_role_binding(
        namespace,
        {
            "metadata": {"name": name},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": namespace}],
        },
    )
