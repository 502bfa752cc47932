"""A training that is over in seconds."""

from typing import Any

from tests.e2e.harness import bucket

# Some of the demo's digits, trained just long enough to be told apart.
LOOP: dict[str, Any] = {
    "batch_size": 32,
    "image_size": 16,
    "learning_rate": 0.1,
    "warmup_epochs": 2.0,
    "label_smoothing": 0.1,
    "workers": 0,
    "checkpoint_epochs": 5,
    "checkpoint_minutes": 0.0,
}
TRAINING: dict[str, Any] = {
    "source": f"gs://{bucket.DATASET}",
    "model": "cifar_resnet8",
    "epochs": 20,
    "training": LOOP,
    "gpus_per_node": 0,
    "sync": {"dataset": "digits"},
    "gate": {"min_accuracy": 0.85},
    "model_name": "digits",
    "destination": f"gs://{bucket.MODELS}/digits",
}
# The trainer's image runs as root in this cluster, so the user of our own image is named.
WORKERS: dict[str, Any] = {"run_as_user": 1000, "env": {"OMP_NUM_THREADS": "1"}}
