"""KServe's InferenceService for a bundle: on Triton, OpenVINO Model Server, or our own server.

The two runtimes are those that KServe installs as ClusterServingRuntimes. Neither server was to be
had where this was made: manifests are held to KServe's schema, the layout to the published rules.
"""

import os
from collections.abc import Mapping
from typing import Any, Literal, get_args

from kfp_ddp.core.errors import InputError

API_VERSION, KIND = "serving.kserve.io/v1beta1", "InferenceService"
TRITON, OPENVINO, OURS = "kserve-tritonserver", "kserve-openvino", "kfp-ddp"
Runtime = Literal["kserve-tritonserver", "kserve-openvino", "kfp-ddp"]
RUNTIMES: tuple[str, ...] = get_args(Runtime)
MOUNTED = "/mnt/models"
"""Where KServe's storage initializer puts what a storageUri names."""
PORT = 8080
# OpenVINO computes in bf16 where a CPU can, unless it is told.
_EXACT = '--plugin_config={"INFERENCE_PRECISION_HINT":"f32"}'


def manifest(
    name: str,
    bundle: str,
    model_name: str,
    runtime: str,
    *,
    namespace: str = "",
    image: str = "",
    resources: Mapping[str, Any] | None = None,
    service_account: str = "",
) -> dict[str, Any]:
    """The manifest of a service that answers with a bundle's model.

    Args:
        name: Of the service.
        bundle: Address of the bundle, gs://, s3://, az:// or pvc://claim/folder.
        model_name: Of the model, as in the bundle's `serving/`.
        runtime: One of `RUNTIMES`.
        namespace: Of the service; empty for that of whoever applies it.
        image: Of our own server, with this package and its extra `serve`.
        resources: Requests and limits of the server's container; KServe's or the runtime's without.
        service_account: Whose secrets let KServe read the bundle; empty for the default one.

    Raises:
        InputError: KServe reads no such address, or a runtime that there is not.
    """
    if runtime not in RUNTIMES:
        raise InputError(f"runtime is {runtime!r}: give one of {', '.join(RUNTIMES)}")
    address = storage_uri(bundle)
    if runtime == OURS:
        server = _own_server(address, model_name, image)
        predictor: dict[str, Any] = {"containers": [server]}
    else:
        server = _model(address, model_name, runtime)
        predictor = {"model": server}
    if resources:
        server["resources"] = dict(resources)
    if service_account:
        predictor["serviceAccountName"] = service_account
    metadata = {"name": name, **({"namespace": namespace} if namespace else {})}
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": metadata,
        "spec": {"predictor": predictor},
    }


def _own_server(address: str, model_name: str, image: str) -> dict[str, Any]:
    """The container of our server, to which KServe brings the bundle."""
    if not image:
        raise InputError(
            f"runtime {OURS} needs an image: one with this package and its extra serve"
        )
    return {
        "name": "kserve-container",
        "image": image,
        "command": ["kfp-ddp", "serve", MOUNTED, "--name", model_name, "--port", str(PORT)],
        "env": [
            {"name": "STORAGE_URI", "value": address},
            {"name": "PROTOCOL", "value": "v2"},
        ],
        "ports": [{"containerPort": PORT, "protocol": "TCP"}],
        "readinessProbe": {"httpGet": {"path": "/v2/health/ready", "port": PORT}},
    }


def _model(address: str, model_name: str, runtime: str) -> dict[str, Any]:
    """The model for a runtime that KServe has."""
    model = {
        "modelFormat": {"name": "onnx"},
        "protocolVersion": "v2",
        "runtime": runtime,
        "storageUri": f"{address}/serving",
    }
    if runtime == OPENVINO:
        return model | {"storageUri": f"{address}/serving/{model_name}", "args": [_EXACT]}
    return model


def served_name(name: str, model_name: str, runtime: str) -> str:
    """What the model is called in `/v2/models/<here>/infer` of a service with this name.

    KServe starts OpenVINO Model Server with the service's name for the model's.
    """
    return name if runtime == OPENVINO else model_name


def storage_uri(bundle: str) -> str:
    """The address of a bundle as KServe's storage initializer takes it.

    Raises:
        InputError: it reads no such address, or the Azure account is not known.
    """
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
