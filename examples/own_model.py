"""A network of your own, trained by kfp-ddp's loop.

    kfp-ddp run ./photos --local --set model=examples/own_model.py:build
    kfp-ddp run gs://bucket/photos --set model=examples/own_model.py:build

The file is sent with the run; no image has to contain it.
"""

import torch
from torch import nn


class Mixer(nn.Module):
    """Convolutions over the image, and over channels, by turns."""

    def __init__(self, num_classes: int, width: int = 48, depth: int = 4, patch: int = 4) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Conv2d(3, width, patch, patch), nn.BatchNorm2d(width))
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 5, padding=2, groups=width),
                nn.GELU(),
                nn.Conv2d(width, width, 1),
                nn.BatchNorm2d(width),
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(width, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits [N, classes] of normalised images [N, 3, S, S]."""
        x = self.embed(images)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean(dim=(2, 3)))


def build(num_classes: int) -> nn.Module:
    """What `model=own_model.py:build` names."""
    return Mixer(num_classes)


def optimizer(network: nn.Module, config) -> torch.optim.Optimizer:
    """In place of SGD: `config` has the settings of the run, whose schedule its rates follow."""
    return torch.optim.AdamW(network.parameters(), lr=config.learning_rate, weight_decay=0.01)
