"""The step `deploy` in its own pod, as KFP runs it, and bundles in the bucket for it."""

import contextlib
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import onnx.parser
import requests
from kubernetes import client

from tests.e2e.harness import bucket
from tests.e2e.harness.grounds import Grounds
from tests.e2e.harness.kserve import READER
from tests.e2e.harness.launch_step import Step

NAME = "flowers"
SIGNATURE = {"inputs": [{"shape": ["batch", 3, 2, 2]}], "preprocessing": {"short_side": 2}}
FACTORS = (1.0, 2.0, -1.5)
# The logits are the mean of the pixels by these factors.
MODEL = """
<ir_version: 8, opset_import: ["" : 18]>
flowers (uint8[n, 3, 2, 2] images) => (float[n, 3] logits)
<int64[3] axes = {1, 2, 3}, int64[2] rows = {-1, 1}, float[1, 3] factors = {1.0, 2.0, -1.5}> {
    pixels = Cast <to = 1> (images)
    mean = ReduceMean <keepdims = 0> (pixels, axes)
    column = Reshape (mean, rows)
    logits = Mul (column, factors)
}
"""
RUN = """
import json, sys
from kfp import dsl
from kfp_ddp.components.deploy.component import deploy
report = dsl.Markdown(uri="/tmp/report.md")
url, version = deploy.python_func(deploy_report=report, **json.loads(sys.argv[1]))
print("DONE", json.dumps({"url": url, "version": version}), flush=True)
"""


@contextmanager
def serve_models(api: client.ApiClient) -> Iterator[str]:
    """Run a server of S3 with a bucket for bundles; yields the URL for pods and tests."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("0.0.0.0", 0, verbose=False)
    server.start()
    url = f"http://{bucket.node_address(api)}:{server.get_host_and_port()[1]}"
    try:
        requests.put(f"{url}/{bucket.MODELS}", timeout=30).raise_for_status()
        yield url
    finally:
        server.stop()


def publish(url: str, seed: int, fault: str = "") -> str:
    """Upload a bundle with its own answer, and make it the champion; return its URI.

    `fault` is one of the harness's server: crash, slow, unready or wrong.
    """
    request = {"name": "images", "datatype": "UINT8", "shape": [1, 3, 2, 2], "data": [seed] * 12}
    data = [seed * factor for factor in FACTORS]
    response = {
        "model_name": NAME,
        "parameters": {"allowed_abs_difference": 1e-4},
        "outputs": [{"name": "logits", "datatype": "FP32", "shape": [1, 3], "data": data}],
    }
    model: onnx.ModelProto = onnx.parser.parse_model(MODEL)
    for node in model.graph.node:  # the parser writes an empty one, which no export of ours has
        node.ClearField("domain")
    files = {
        "classes.json": b'["a", "b", "c"]',
        "model.onnx": model.SerializeToString(),
        "signature.json": json.dumps(SIGNATURE).encode(),
        "sample/request.json": json.dumps({"inputs": [request]}).encode(),
        "sample/response.json": json.dumps(response).encode(),
        "serving/answer.json": json.dumps({"fault": fault, "response": response}).encode(),
    }
    lines = [f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in files.items()]
    manifest = "".join(lines).encode()
    digest = hashlib.sha256(manifest).hexdigest()
    files |= {"MANIFEST.sha256": manifest, "_SUCCESS": f"{digest}\n".encode()}
    folder = f"exports/{NAME}/{digest[:12]}"
    for name, content in files.items():
        _put(url, f"{folder}/{name}", content)
    uri = f"s3://{bucket.MODELS}/{folder}"
    publish_again(url, uri)
    return uri


def publish_again(url: str, bundle: str) -> None:
    """Make an existing bundle the champion."""
    _put(url, f"exports/{NAME}/CHAMPION", f"{bundle[-12:]}\n".encode())


def _put(url: str, name: str, content: bytes) -> None:
    import boto3

    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
    with contextlib.closing(
        boto3.client("s3", endpoint_url=url, region_name="us-east-1", **keys)
    ) as s3:
        s3.put_object(Bucket=bucket.MODELS, Key=name, Body=content)


class DeployStep(Step):
    """The component in its pod."""

    def __init__(self, grounds: Grounds, bundle: str, service: str, **release: Any) -> None:
        super().__init__(grounds, "deploy")
        settings = {
            "service": service,
            "service_account": READER,
            "service_cpu": "100m",
            "service_memory": "256Mi",
            "service_minutes": 3,
            "canary_requests": 2,
            **release,
        }
        inputs = {"bundle": bundle, "model_name": NAME, "release": settings, "run_id": self.run_id}
        self.program(RUN, inputs)

    def done(self) -> dict[str, str]:
        """Wait for success; return the outputs."""
        assert self.wait() == "Succeeded", self.log()
        (line,) = (one for one in self.log().splitlines() if one.startswith("DONE "))
        outputs: dict[str, str] = json.loads(line.removeprefix("DONE "))
        return outputs

    def error(self) -> str:
        """Wait for failure; return the error."""
        assert self.wait() == "Failed", self.log()
        assert "Traceback" not in self.log(), self.log()
        return self.log().splitlines()[-1].removeprefix("error: ")
