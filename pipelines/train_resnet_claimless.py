"""The pipeline `train_resnet_claimless`: runs in a bucket, the dataset on each node."""

from kfp import dsl

from kfp_ddp.components.preflight.parameters import described
from kfp_ddp.pipelines.steps import Claims
from kfp_ddp.pipelines.train_resnet import in_a_bucket

train_resnet_claimless = dsl.pipeline(
    name="train-resnet-claimless",
    display_name="Train a ResNet with PyTorch DDP, without claims",
    description="Like train-resnet, with checkpoints in a bucket and the dataset on each node.",
)(described(in_a_bucket("train_resnet_claimless", Claims(data=False, work=False))))
