"""The pipeline `train_resnet_claimless`: runs in a bucket, the dataset on each node."""

from kfp import dsl

from kfp_ddp.pipelines.steps import Claims
from kfp_ddp.pipelines.train_resnet import like_train_resnet, wire

train_resnet_claimless = dsl.pipeline(
    name="train-resnet-claimless",
    display_name="Train a ResNet with PyTorch DDP, without claims",
    description="Like train-resnet, with checkpoints in a bucket and the dataset on each node.",
)(
    like_train_resnet(
        wire,
        "train_resnet_claimless",
        Claims(data=False, work=False),
        without=("work_claim",),
        required=("work",),
    )
)
