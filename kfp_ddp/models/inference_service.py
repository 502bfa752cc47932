"""KServe's InferenceService for a bundle: on Triton, OpenVINO Model Server, or our own server.

The first two are ClusterServingRuntimes of KServe. They were not run with these manifests: tests
give the manifests to KServe's webhooks, and check the layout against the published rules.
"""

import os
from collections.abc import Mapping
from typing import Any, Literal, get_args

from kfp_ddp.core.errors import InputError

API_VERSION = "serving.kserve.io/v1beta1"
KIND = "InferenceService"
TRITON = "kserve-tritonserver"
OPENVINO = "kserve-openvino"
OURS = "kfp-ddp"
Runtime = Literal["kserve-tritonserver", "kserve-openvino", "kfp-ddp"]
RUNTIMES: tuple[str, ...] = get_args(Runtime)
MOUNTED = "/mnt/models"
"""Folder in which KServe's storage initializer puts the files of a storageUri."""
PORT = 8080
DRAIN_SECONDS = 10
"""Time after SIGTERM in which a pod takes requests, as nodes still route them to it.

On KServe 0.20 in Standard mode, four clients and two busy cores: 13 requests of 16,643 were lost in
three rollouts with 5 seconds, 0 of 19,382 with 10; of a server that stops at once 35 of 5,737 in
two, 0 of 6,138 with a hook of 10.
"""
# The default of OpenVINO is bf16 on CPUs that have it.
_EXACT = '--plugin_config={"INFERENCE_PRECISION_HINT":"f32"}'


def manifest(
    name: str,
    bundle: str,
    model_name: str,
    runtime: str,
    *,
    image: str = "",
    resources: Mapping[str, Any] | None = None,
    service_account: str = "",
) -> dict[str, Any]:
    """Return the manifest of a service for a bundle's model; InputError where it is impossible."""
    if runtime not in RUNTIMES:
        raise InputError(f"runtime is {runtime!r}: give one of {', '.join(RUNTIMES)}")
    address = storage_uri(bundle)
    if runtime == OURS:
        server = _own_server(address, model_name, image)
        predictor: dict[str, Any] = {"containers": [server]}
    else:
        server = {
            "modelFormat": {"name": "onnx"},
            "protocolVersion": "v2",
            "runtime": runtime,
            "storageUri": f"{address}/serving",
        }
        if runtime == OPENVINO:
            server |= {"storageUri": f"{address}/serving/{model_name}", "args": [_EXACT]}
        predictor = {"model": server}
    if resources:
        server["resources"] = dict(resources)
    if service_account:
        predictor["serviceAccountName"] = service_account
    service = {"metadata": {"name": name}, "spec": {"predictor": predictor}}
    return {"apiVersion": API_VERSION, "kind": KIND, **service}


def _own_server(address: str, model_name: str, image: str) -> dict[str, Any]:
    """Return the container of our server; KServe downloads the bundle for it."""
    if not image:
        raise InputError(
            f"runtime {OURS} needs an image: one with this package and its extra serve"
        )
    return {
        "name": "kserve-container",
        "image": image,
        "command": ["kfp-ddp", "serve", MOUNTED, "--name", model_name, "--port", str(PORT)],
        "env": [{"name": "STORAGE_URI", "value": address}, {"name": "PROTOCOL", "value": "v2"}],
        "ports": [{"containerPort": PORT, "protocol": "TCP"}],
        "readinessProbe": {"httpGet": {"path": "/v2/health/ready", "port": PORT}},
    }


def served_name(name: str, model_name: str, runtime: str) -> str:
    """Return the model's name in requests; KServe gives OpenVINO that of the service."""
    return name if runtime == OPENVINO else model_name


def storage_uri(bundle: str) -> str:
    """Return the address for KServe's storage initializer; raise InputError if it has none."""
    bundle = bundle.rstrip("/")
    scheme, _, rest = bundle.partition("://")
    if scheme in ("gs", "s3", "pvc") and rest:
        return bundle
    if scheme == "az" and rest:
        account = os.environ.get("AZURE_STORAGE_ACCOUNT", "")
        if not account:
            raise InputError(
                f"KServe reads {bundle} by its account's address: set AZURE_STORAGE_ACCOUNT"
            )
        return f"https://{account}.blob.core.windows.net/{rest}"
    raise InputError(
        f"KServe cannot read {bundle}: give the bundle's address in a bucket (gs://, s3://, az://) "
        "or on a claim, pvc://claim/folder"
    )
