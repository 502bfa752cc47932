"""The step that trains a ResNet with PyTorch DDP."""

from kfp_ddp.components.train.component import train

__all__ = ["train"]
