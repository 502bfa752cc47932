"""`kfp-ddp serve`: serve the model of a bundle by the v2 inference protocol."""

import os
import socket
from contextlib import closing
from pathlib import Path

import click
import yaml

from kfp_ddp.cli.bundles import KEY, find_signer
from kfp_ddp.cli.options import require, text_option
from kfp_ddp.core.errors import InputError
from kfp_ddp.models.serving.inference_service import RUNTIMES


@click.command("serve")
@click.argument("bundle")
@text_option("--variant", help="Variant of the model, such as int8.")
@click.option(
    "--runtime",
    type=click.Choice(["onnxruntime", "openvino"]),
    help="Runtime of the model.  [default: the installed one]",
)
@click.option("--name", help="Name of the model in requests.  [default: the bundle's]")
@text_option("--listen", help="Address to listen on.  [default: 127.0.0.1, in a pod 0.0.0.0]")
@click.option("--port", type=click.IntRange(1, 65535), default=8080, help="HTTP port.")
@click.option(
    "--grpc-port", type=click.IntRange(0, 65535), default=8081, help="gRPC port; 0 for none."
)
@click.option(
    "--threads",
    type=click.IntRange(0),
    default=0,
    help="Threads per call; 0 for the runtime's default.",
)
@click.option(
    "--max-batch",
    type=click.IntRange(1),
    default=32,
    help="Maximum batch of images from waiting requests.",
)
@click.option(
    "--max-waiting",
    type=click.IntRange(1),
    default=1024,
    help="Maximum number of waiting images; further requests are refused (503).",
)
@KEY
@click.option(
    "--manifest",
    type=click.Choice(RUNTIMES),
    help="Print KServe's InferenceService for the bundle's URI and this runtime instead.",
)
@text_option("--image", help="Image for --manifest kfp-ddp, with the extra `serve`.")
def command(
    bundle: str,
    variant: str,
    runtime: str | None,
    name: str | None,
    listen: str,
    port: int,
    grpc_port: int,
    threads: int,
    max_batch: int,
    max_waiting: int,
    key: Path | None,
    manifest: str | None,
    image: str,
) -> None:
    """Serve the model of BUNDLE: a page to try it on, and the protocols of KServe.

    BUNDLE is a folder or a URI (gs://, s3://, az://): a bundle, the output of a run, or the folder
    of a model's versions, for its champion. Only files of the bundle's manifest are loaded, and the
    model is tested on the bundle's sample first. Open http://localhost:8080 in a browser to try the
    model on pictures. POST /predict takes a picture file. The v2 protocol is at /v2 and on gRPC,
    metrics for Prometheus at /metrics. On SIGTERM the server completes the current requests, for at
    most 30 seconds; in a pod it first takes new ones for 10 seconds.

    \b
    kfp-ddp serve run-output/latest/bundle --name flowers
    curl --data-binary @picture.jpg localhost:8080/predict
    curl --json @run-output/latest/bundle/sample/request.json localhost:8080/v2/models/flowers/infer
    kfp-ddp serve gs://my-bucket/models/flowers --manifest kserve-tritonserver | kubectl apply -f -
    """
    if manifest:
        click.echo(_manifest(bundle, name, manifest, image), nl=False)
        return

    require("serve")
    from kfp_ddp.core.text import printable
    from kfp_ddp.serve.model import ready

    listen = listen or ("0.0.0.0" if "KUBERNETES_SERVICE_HOST" in os.environ else "127.0.0.1")  # noqa: S104
    for number in filter(None, (port, grpc_port)):
        _check_free(listen, number)
    model = ready(bundle, variant, runtime or "", threads, find_signer(key))
    host = "localhost" if listen in ("0.0.0.0", "::", "::1") else listen  # noqa: S104
    what = f"{model.uri} ({model.version}), {model.file} in {model.loaded.runtime}"
    from kfp_ddp.serve.kserve_server import serve

    serve(
        model,
        name or model.name,
        listen=listen,
        port=port,
        grpc_port=grpc_port,
        largest=max_batch,
        waiting=max_waiting,
        line=printable(f"{what}: open http://{host}:{port}"),
    )


def _manifest(bundle: str, name: str | None, runtime: str, image: str) -> str:
    """Return the InferenceService of a bundle that KServe can read."""
    from kfp_ddp.models.champion import open_bundle
    from kfp_ddp.models.serving.inference_service import manifest

    sealed = open_bundle(bundle)
    model = sealed.model_name
    service = manifest(name or model.lower(), sealed.uri, model, runtime, image=image)
    return yaml.safe_dump(service, sort_keys=False)


def _check_free(address: str, port: int) -> None:
    """Refuse a port that is not free, before the model is loaded."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with closing(socket.create_server((address, port), family=family)):
            return
    except OSError as error:
        raise InputError(
            f"port {port} of {address} is not available ({error.strerror}): give another one"
        ) from None
