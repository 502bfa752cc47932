"""The real KServe of the cluster, in Standard mode.

It runs the server below, as Triton's image is not available.
"""

from typing import Any

import pytest
from kubernetes import client

from tests.e2e.harness.grounds import IMAGE, Grounds, with_retries

GROUP = "serving.kserve.io"
VERSION = "v1beta1"
PLURAL = "inferenceservices"
READER = "reader"
"""The service account with the secret of the bucket."""

# Answers as serving/answer.json of its bundle says, and stops at once.
SERVER = """
import json, os, signal, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

answer = json.load(open("/mnt/models/answer.json"))
fault, response = answer["fault"], answer["response"]
if fault == "crash":
    sys.exit("the model cannot be loaded")
if fault == "wrong":
    response["outputs"][0]["data"] = [x + 1 for x in response["outputs"][0]["data"]]

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        ready = fault != "unready"
        self.send_response(200 if ready else 503)
        self.end_headers()

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["inputs"][0]["datatype"] == "UINT8"
        if fault == "slow":
            time.sleep(30)
        body = json.dumps(response).encode()
        found = self.path == f"/v2/models/{response['model_name']}/infer"
        self.send_response(200 if found else 404)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass

signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
ThreadingHTTPServer(("0.0.0.0", 8080), Handler).serve_forever()
"""


def container(**more: Any) -> dict[str, Any]:
    """Return the container of the server above."""
    return {
        "name": "kserve-container",
        "image": IMAGE,
        "command": ["python3", "-u", "-c", SERVER],
        "ports": [{"containerPort": 8080}],
        "readinessProbe": {"httpGet": {"path": "/v2/health/ready", "port": 8080},
                           "periodSeconds": 1},
        "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}},
        **more,
    }  # fmt: skip


def is_installed(api: client.ApiClient) -> bool:
    """Return whether the cluster has the real controller."""
    try:
        client.AppsV1Api(api).read_namespaced_deployment("kserve-controller-manager", "kserve")
    except client.ApiException:
        return False
    return True


class Kserve:
    """InferenceServices of a namespace."""

    def __init__(self, grounds: Grounds) -> None:
        self.grounds = grounds
        self.apps = client.AppsV1Api(grounds.api)

    def services(self) -> list[dict[str, Any]]:
        """Return all of the namespace."""
        space = self.grounds.namespace
        list_all = self.grounds.custom.list_namespaced_custom_object
        answer = with_retries(lambda: list_all(GROUP, VERSION, space, PLURAL))
        services: list[dict[str, Any]] = answer["items"]
        return services

    def service(self, name: str) -> dict[str, Any] | None:
        """Return the current InferenceService."""
        return next((one for one in self.services() if one["metadata"]["name"] == name), None)

    def pods(self, deployment: str) -> set[str]:
        """Return the UIDs of a Deployment's pods that are not being deleted."""
        space, selector = self.grounds.namespace, f"app=isvc.{deployment}"
        pods = self.grounds.core.list_namespaced_pod(space, label_selector=selector).items
        return {pod.metadata.uid for pod in pods if not pod.metadata.deletion_timestamp}


def in_namespace(grounds: Grounds) -> Kserve:
    """Return KServe, prepared for a namespace; skips the test without its controller."""
    if not is_installed(grounds.api):
        pytest.skip("KServe's controller is not installed")
    _prepare(grounds)
    return Kserve(grounds)


def _prepare(grounds: Grounds) -> None:
    """Give the namespace the login of the bucket, and the server above in the place of Triton."""
    given = grounds.environment
    endpoint = given["AWS_ENDPOINT_URL_S3"].removeprefix("http://")
    of_s3 = {"serving.kserve.io/s3-endpoint": endpoint, "serving.kserve.io/s3-usehttps": "0"}
    keys = {name: given[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
    secret = {"metadata": {"name": READER, "annotations": of_s3}, "stringData": keys}
    account = {"metadata": {"name": READER}, "secrets": [{"name": READER}]}
    grounds.core.create_namespaced_secret(grounds.namespace, secret)
    grounds.core.create_namespaced_service_account(grounds.namespace, account)
    body = {
        "apiVersion": f"{GROUP}/v1alpha1",
        "kind": "ServingRuntime",
        "metadata": {"name": "kserve-tritonserver"},
        "spec": {
            "supportedModelFormats": [{"name": "onnx"}],
            "protocolVersions": ["v2"],
            "containers": [container()],
        },
    }
    grounds.custom.create_namespaced_custom_object(
        GROUP, "v1alpha1", grounds.namespace, "servingruntimes", body
    )
