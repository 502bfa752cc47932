"""The step that trains a ResNet with PyTorch DDP."""

from .component import train

__all__ = ["train"]
