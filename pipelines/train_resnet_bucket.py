"""The pipeline `train_resnet_bucket`: the runs' folders in a bucket, the dataset on a PVC.

The PVC may be ReadWriteOnce with publish=clone or snapshot: only one node mounts it at a time.
"""

from kfp import dsl

from kfp_ddp.pipelines.steps import Claims
from kfp_ddp.pipelines.train_resnet import like_train_resnet, wire

train_resnet_bucket = dsl.pipeline(
    name="train-resnet-bucket",
    display_name="Train a ResNet with PyTorch DDP, runs in a bucket",
    description="Like train-resnet, with checkpoints in a bucket: a claim for the dataset alone.",
)(
    like_train_resnet(
        wire,
        "train_resnet_bucket",
        Claims(work=False),
        without=("work_claim",),
        required=("work",),
    )
)
