"""Servers beside the cluster, which pods reach at the node's address: buckets, packages."""

import functools
import io
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path

import requests
from kubernetes import client

from tests.serving import Files, serving

DATASET, MODELS = "digits", "models"
TRAIN, VAL = 40, 10  # images of each of the ten classes


@contextmanager
def serve(api: client.ApiClient) -> Iterator[str]:
    """Serve buckets of gcp-storage-emulator, in memory; the URL that pods and tests use.

    The tests run on the node's network, so a server here is at the node's address.
    """
    from gcp_storage_emulator.server import create_server

    server = create_server("0.0.0.0", 0, in_memory=True)
    server.start()
    try:
        yield f"http://{node_address(api)}:{server._api._httpd.server_port}"
    finally:
        server.stop()


@contextmanager
def serving_index(api: client.ApiClient, folder: Path) -> Iterator[str]:
    """Serve a package index of tests.package_index; its address."""
    server = ThreadingHTTPServer(("0.0.0.0", 0), functools.partial(Files, directory=folder))
    with serving(server):
        yield f"http://{node_address(api)}:{server.server_port}/simple/"


def node_address(api: client.ApiClient) -> str:
    """Where pods reach a server that runs beside the tests."""
    node = client.CoreV1Api(api).list_node().items[0]
    return str(next(a.address for a in node.status.addresses if a.type == "InternalIP"))


def fill(url: str, bucket: str = DATASET, train: int = TRAIN, val: int = VAL) -> None:
    """Make a bucket with some of scikit-learn's digits: so many images of each class."""
    make(url, bucket)
    for name, content in digits(train, val):
        upload(url, bucket, name, content)


def make(url: str, bucket: str) -> None:
    """Make an empty bucket."""
    body = {"name": bucket}
    requests.post(f"{url}/storage/v1/b?project=e2e", json=body, timeout=30).raise_for_status()


def upload(url: str, bucket: str, name: str, content: bytes) -> None:
    """Put one object in a bucket."""
    requests.post(
        f"{url}/upload/storage/v1/b/{bucket}/o",
        params={"uploadType": "media", "name": name},
        data=content,
        timeout=30,
    ).raise_for_status()


def names(url: str, bucket: str) -> list[str]:
    """The objects of a bucket."""
    answer = requests.get(f"{url}/storage/v1/b/{bucket}/o", timeout=30).json()
    return [item["name"] for item in answer.get("items", [])]


def digits(train: int = TRAIN, val: int = VAL) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the images."""
    import numpy as np
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    counts = [0] * 10
    for pixels, label in zip(digits.images, digits.target, strict=True):
        if counts[label] < train + val:
            split = "train" if counts[label] < train else "val"
            png = io.BytesIO()
            Image.fromarray((pixels * 255 / 16).astype(np.uint8)).save(png, "PNG")
            yield f"{split}/{label}/{counts[label]:04}.png", png.getvalue()
        counts[label] += 1
