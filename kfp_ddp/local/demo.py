"""The demo: the full pipeline on scikit-learn's digits in an emulated bucket.

Prerequisite: the `demo` extra. `kfp-ddp demo` runs it.
"""

import contextlib
import gzip
import io
import logging
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import HTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kfp_ddp.core.errors import InputError
from kfp_ddp.local import engine
from kfp_ddp.local.display import Phase
from kfp_ddp.local.folder import LocalRun, begin, identity_of, read_local_run, unfinished

BUCKET = "digits"
MODELS = "models"
VALIDATION_EVERY = 5
DEMO = "demo "
"""Start of the identity of a demo's run."""
DIGITS: dict[str, Any] = {
    "source": f"gs://{BUCKET}",
    "recipe": "digits",
    "training": {"checkpoint_epochs": 2, "checkpoint_minutes": 0.0},
    "sync": {"dataset": "digits", "verify": "quick"},
    "gate": {"min_accuracy": 0.97},
    "backend": "local",
    "model_name": "digits",
    "destination": f"gs://{MODELS}/digits",
}


def empty() -> Any:
    """Return a storage in memory, for `serve`."""
    from gcp_storage_emulator.storage import Storage

    class MemoryStorage(Storage):  # type: ignore[misc]
        def _write_config_to_file(self) -> None:
            """Skip the index, which each upload would write again."""

    return MemoryStorage(use_memory_fs=True)


@contextlib.contextmanager
def serve(storage: Any = None) -> Iterator[str]:
    """Serve a storage of `empty` on a free loopback port, in a thread, and yield the URL."""
    from gcp_storage_emulator.server import RequestHandler

    # It logs each request for a missing name, which is not an error.
    logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)
    handler = partial(RequestHandler, storage or empty())
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def fill_storage(storage: Any) -> int:
    """Write the digits as PNG files in class folders, and return their number.

    1,797 grayscale images of 8×8 pixels, every fifth of a class in val/, the rest in train/.
    Source: sklearn.datasets.load_digits, UCI "Optical Recognition of Handwritten Digits".
    """
    from gcp_storage_emulator.handlers import objects

    for bucket in (BUCKET, MODELS):
        storage.create_bucket(bucket, {"kind": "storage#bucket", "id": bucket, "name": bucket})
    uploaded = 0
    for name, content in _digits():  # without requests, which would take seconds
        size = str(len(content))
        about = objects._make_object_resource("", BUCKET, name, "image/png", size)
        storage.create_file(BUCKET, name, content, objects._checksums(content, about))
        uploaded += 1
    return uploaded


def _digits() -> Iterator[tuple[str, bytes]]:
    import numpy as np
    from PIL import Image

    package = find_spec("sklearn")  # its import takes two seconds
    assert package is not None
    file = Path(str(package.origin)).parent / "datasets" / "data" / "digits.csv.gz"
    with gzip.open(file, "rt") as rows:
        table = np.loadtxt(rows, delimiter=",", dtype=int)
    seen = [0] * 10
    for *pixels, label in table:
        split = "val" if seen[label] % VALIDATION_EVERY == 0 else "train"
        png = io.BytesIO()
        shades = np.array(pixels).reshape(8, 8) * 255 / 16
        Image.fromarray(shades.astype(np.uint8)).save(png, "PNG")
        yield f"{split}/{label}/{seen[label]:04}.png", png.getvalue()
        seen[label] += 1


def run(output: Path, ranks: int, arguments: dict[str, object]) -> dict[str, Any]:
    """Run the full pipeline in `output`, and return the summary; JobError if it failed."""
    started = time.monotonic()
    settings = DIGITS | arguments | {"job": {"nproc_per_node": ranks}}
    identity = f"{DEMO}{identity_of(demo=settings)}"
    earlier = read_local_run(output)
    if earlier is not None and not earlier.identity.startswith(DEMO):
        raise InputError(f"{output} holds a run that is no demo: name another folder with --output")
    run = unfinished(output, identity) or begin(LocalRun(identity=identity), output, "", True)
    storage = empty()
    phase = Phase("bucket")
    phase.show(f"filling gs://{BUCKET}")
    images = fill_storage(storage)
    phase.detail = f"{images:,} images in gs://{BUCKET}, served by gcp-storage-emulator"
    phase.end(good=True)
    with serve(storage) as url:
        environment = {"STORAGE_EMULATOR_HOST": url, "OMP_NUM_THREADS": "1"}
        return engine.run(run, started, settings, environment)
