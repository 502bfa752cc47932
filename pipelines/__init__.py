"""Pipelines. Each is compiled to `compiled/<name>.yaml`."""

MODULES = {
    "train_resnet": "train_resnet",
    "train_resnet_bucket": "variants",
    "train_resnet_claimless": "variants",
    "retrain": "variants",
    "finetune": "variants",
    "evaluate_checkpoint": "evaluate_checkpoint",
    "batch_predict": "batch_predict",
    "sync_dataset": "sync_dataset",
    "sweep": "variants",
    "own_script": "variants",
}
"""Module of each pipeline."""
NAMES = tuple(MODULES)
