"""A training that is over in seconds."""

from typing import Any

from tests.e2e.harness import bucket

# Some of the demo's digits, trained just long enough to be told apart.
TRAINING: dict[str, Any] = {
    "source": f"gs://{bucket.DATASET}",
    "dataset": "digits",
    "model": "cifar_resnet8",
    "model_name": "digits",
    "image_size": 16,
    "epochs": 20,
    "batch_size": 32,
    "learning_rate": 0.1,
    "warmup_epochs": 2.0,
    "label_smoothing": 0.1,
    "workers": 0,
    "checkpoint_epochs": 5,
    "checkpoint_minutes": 0.0,
    "min_accuracy": 0.85,
    "destination": f"gs://{bucket.MODELS}/digits",
}
