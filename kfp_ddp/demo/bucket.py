"""A bucket on this machine: gcp-storage-emulator, filled with scikit-learn's digits."""

import contextlib
import io
import logging
from collections.abc import Iterator
from typing import Any

import requests

BUCKET = "digits"
MODELS = "models"
VALIDATION_EVERY = 5


@contextlib.contextmanager
def serve() -> Iterator[str]:
    """Serve buckets kept in memory, on a free loopback port; yields the URL.

    A thread, not a process: nothing is left behind, however the demo ends.
    """
    from gcp_storage_emulator.server import APIThread
    from gcp_storage_emulator.storage import Storage

    class MemoryStorage(Storage):  # type: ignore[misc]
        def _write_config_to_file(self) -> None:
            """Spare the index of all objects that each upload would write again."""

    # It tells of each name that is asked for and not there, which is an answer and no error.
    logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)
    server = APIThread("127.0.0.1", 0, MemoryStorage(use_memory_fs=True), daemon=True)
    server.start()
    server.is_running.wait()
    try:
        yield f"http://127.0.0.1:{server._httpd.server_port}"
    finally:
        server.join()


def fill(url: str) -> int:
    """Upload the digits as PNG files in class folders and return how many.

    1,797 grayscale images of 8×8 pixels, every fifth of a class in val/, the rest in train/.
    Source: sklearn.datasets.load_digits, UCI "Optical Recognition of Handwritten Digits".
    """
    with requests.Session() as session:
        for bucket in (BUCKET, MODELS):
            _post(session, f"{url}/storage/v1/b?project=demo", json={"name": bucket})
        uploaded = 0
        for name, content in _digits():
            _post(
                session,
                f"{url}/upload/storage/v1/b/{BUCKET}/o",
                params={"uploadType": "media", "name": name},
                data=content,
                headers={"Content-Type": "image/png"},
            )
            uploaded += 1
    return uploaded


def _post(session: requests.Session, url: str, **given: Any) -> None:
    session.post(url, timeout=30, **given).raise_for_status()


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
