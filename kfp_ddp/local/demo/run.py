"""Run the demo: bucket up and filled, the pipeline on it, results gathered."""

import threading
import time
from pathlib import Path
from typing import Any

from kfp_ddp.local import engine
from kfp_ddp.local.demo import bucket
from kfp_ddp.local.screen import Phase

DIGITS: dict[str, Any] = {
    "source": f"gs://{bucket.BUCKET}",
    "recipe": "digits",
    "training": {"checkpoint_epochs": 2, "checkpoint_minutes": 0.0},
    "sync": {"dataset": "digits"},
    "gate": {"min_accuracy": 0.97},
    "backend": "local",
    "model_name": "digits",
    "destination": f"gs://{bucket.MODELS}/digits",
}


def run(output: Path, ranks: int, arguments: dict[str, object]) -> dict[str, Any]:
    """Run the whole pipeline, leave what it made in `output`, and return the summary.

    Raises:
        JobError: if the pipeline failed; the line names the step, its error and the log.
    """
    started = time.monotonic()
    engine.prepare(output)
    storage, filled = bucket.empty(), threading.Event()

    def fill() -> None:
        with Phase("bucket") as phase:
            phase.show(f"filling gs://{bucket.BUCKET}")
            images = bucket.fill(storage)
            phase.show(f"{images:,} images in gs://{bucket.BUCKET}, served by gcp-storage-emulator")
        filled.set()

    with bucket.serve(storage, filled) as url:
        given = DIGITS | arguments | {"job": {"nproc_per_node": ranks}}
        environment = {"STORAGE_EMULATOR_HOST": url, "OMP_NUM_THREADS": "1"}
        return engine.run(output, given, environment, started, meanwhile=fill)
