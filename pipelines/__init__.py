"""Pipelines. Each is compiled to `compiled/<name>.yaml`."""

MODULES = {
    "train_resnet": "train_resnet",
    "train_resnet_bucket": "variants",
    "train_resnet_claimless": "variants",
    "retrain": "variants",
    "evaluate_checkpoint": "parts",
    "batch_predict": "parts",
    "sync_dataset": "parts",
    "sweep": "variants",
    "own_script": "variants",
}
"""Module of each pipeline."""
NAMES = tuple(MODULES)
