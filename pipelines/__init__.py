"""Pipelines, one per file. Each is compiled to `compiled/<file name>.yaml`."""

NAMES = (
    *("train_resnet", "train_resnet_bucket", "train_resnet_claimless", "retrain", "finetune"),
    *("evaluate_checkpoint", "sync_dataset", "sweep", "own_script"),
)
