"""The networks, and the arithmetic between stored bytes and their input."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kfp_ddp.training.config import MODELS
from kfp_ddp.training.errors import InputError

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
"""Channel statistics of ImageNet, as torchvision's models use them."""


class _Block(nn.Module):
    """Two 3x3 convolutions and a shortcut (He et al. 2015, figure 2, option B)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = torch.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return torch.relu(out + self.shortcut(x))


class CifarResNet(nn.Module):
    """ResNet-(6n+2) for small images (He et al. 2015, section 4.2), 16, 32 and 64 channels wide."""

    def __init__(self, depth: int, num_classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            nn.Conv2d(3, 16, 3, 1, 1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
        ]
        channels = 16
        for width in (16, 32, 64):
            for _ in range((depth - 2) // 6):
                layers.append(_Block(channels, width, 1 if width == channels else 2))
                channels = width
        self.features = nn.Sequential(*layers)
        self.fc = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Logits [N, classes] of images [N, 3, H, W]."""
        out: Tensor = self.fc(self.features(x).mean(dim=(2, 3)))
        return out


def build(name: str, num_classes: int) -> nn.Module:
    """An untrained network of one of `config.MODELS`.

    Raises:
        InputError: unknown name.
    """
    if name not in MODELS:
        raise InputError(f"model={name!r} is unknown: it is one of {', '.join(MODELS)}")
    if name.startswith("cifar_resnet"):
        return CifarResNet(int(name.removeprefix("cifar_resnet")), num_classes)
    from torchvision.models import get_model  # 1.5 s to import: only for the models that need it

    model: nn.Module = get_model(name, weights=None, num_classes=num_classes)
    return model


def normalise(images: Tensor, mean: Sequence[float] = MEAN, std: Sequence[float] = STD) -> Tensor:
    """Images uint8 [N, 3, H, W] as float32 with mean 0 and deviation 1 a channel."""
    scale = torch.tensor([1 / (255 * s) for s in std], device=images.device).view(1, -1, 1, 1)
    shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)], device=images.device)
    return torch.addcmul(shift.view(1, -1, 1, 1), images, scale)
