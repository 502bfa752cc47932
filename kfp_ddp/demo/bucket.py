"""A bucket on this machine: gcp-storage-emulator, filled with scikit-learn's digits."""

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import requests

BUCKET = "digits"
MODELS = "models"
IMAGES = 1797
VALIDATION_EVERY = 5


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Serve the bucket kept in `folder` from a thread, on a free loopback port; yields the URL.

    A thread, not a process: nothing is left behind, however the demo ends.
    """
    from gcp_storage_emulator.server import create_server

    server = create_server("127.0.0.1", 0, data_dir=str(folder))
    server.start()
    try:
        yield f"http://127.0.0.1:{server._api._httpd.server_port}"
    finally:
        server.stop()


def fill(url: str) -> int:
    """Upload the digits as PNG files in class folders and return how many the bucket holds.

    1,797 grayscale images of 8×8 pixels, every fifth of a class in val/, the rest in train/.
    Source: sklearn.datasets.load_digits, UCI "Optical Recognition of Handwritten Digits".
    """
    session = requests.Session()
    for bucket in (BUCKET, MODELS):
        answer = session.post(f"{url}/storage/v1/b?project=demo", json={"name": bucket}, timeout=30)
        if answer.status_code != requests.codes.conflict:
            answer.raise_for_status()
    present = _names(session, url)
    for name, content in _digits():
        if name not in present:
            session.post(
                f"{url}/upload/storage/v1/b/{BUCKET}/o",
                params={"uploadType": "media", "name": name},
                data=content,
                headers={"Content-Type": "image/png"},
                timeout=30,
            ).raise_for_status()
    return len(_names(session, url))


def _names(session: requests.Session, url: str) -> set[str]:
    answer: dict[str, Any] = session.get(f"{url}/storage/v1/b/{BUCKET}/o", timeout=30).json()
    return {item["name"] for item in answer.get("items", [])}


def _digits() -> Iterator[tuple[str, bytes]]:
    import numpy as np
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    seen = [0] * 10
    for pixels, label in zip(digits.images, digits.target, strict=True):
        split = "val" if seen[label] % VALIDATION_EVERY == 0 else "train"
        png = io.BytesIO()
        Image.fromarray((pixels * 255 / 16).astype(np.uint8)).save(png, "PNG")
        yield f"{split}/{label}/{seen[label]:04}.png", png.getvalue()
        seen[label] += 1
