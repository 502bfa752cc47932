"""Networks, and the normalisation of their input."""

import contextlib
import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.overrides import TorchFunctionMode

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.machine import require
from kfp_ddp.core.text import one_line
from kfp_ddp.training.model import own_model
from kfp_ddp.training.spec import timm_networks
from kfp_ddp.training.spec.config import TrainConfig
from kfp_ddp.training.spec.network_settings import MODELS, SMALL_RESNETS, near

MEAN, STD, _ = timm_networks.Preprocessing()
ADVICE = "use the checkpoint as its training saved it"
"""What to do about weights that do not fit a network."""
WRAPPERS = ("module.", "_orig_mod.")
"""Prefixes that DDP and torch.compile put before the names of weights."""


class CifarBlock(nn.Module):
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
        """Map [N, inputs, H, W] to [N, outputs, H / stride, W / stride]."""
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
                layers.append(CifarBlock(channels, width, 1 if width == channels else 2))
                channels = width
        self.features = nn.Sequential(*layers)
        self.fc = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [N, classes] of images [N, 3, H, W]."""
        out: Tensor = self.fc(self.features(x).mean(dim=(2, 3)))
        return out


class BlurPool(nn.Module):
    """A fixed 3x3 binomial filter with stride 2 against aliasing (Zhang 2019)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        row = torch.tensor([0.25, 0.5, 0.25])
        kernel = (row[:, None] * row).expand(channels, 1, 3, 3).contiguous()
        self.register_buffer("kernel", kernel, persistent=False)
        self.channels = channels

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, C, H, W] to [N, C, ceil(H / 2), ceil(W / 2)]."""
        kernel = self.get_buffer("kernel").to(x.dtype)
        return F.conv2d(x, kernel, stride=2, padding=1, groups=self.channels)


def _blur(network: nn.Module) -> None:
    """Put a blur before each convolution of stride 2, 3x3 or larger, with 16 inputs or more.

    The stride moves from the convolution to the blur, as in FFCV; the weights are the same.
    """
    for parent in list(network.modules()):
        for name, child in list(parent.named_children()):
            if not isinstance(child, nn.Conv2d) or child.kernel_size == (1, 1):
                continue
            if child.stride == (2, 2) and child.in_channels >= 16:
                child.stride = (1, 1)
                setattr(parent, name, nn.Sequential(BlurPool(child.in_channels), child))


def build_for(config: TrainConfig, num_classes: int) -> nn.Module:
    """Build the untrained network of a run; raise InputError as `build` does."""
    return build(config.model, num_classes, config.blur_pool, config.image_size, config.model_code)


def build(
    name: str, num_classes: int, blur_pool: bool = False, image_size: int = 224, code: str = ""
) -> nn.Module:
    """Build a network of `config.MODELS`, some by the evaluated size, or of `code`; InputError."""
    network: nn.Module
    if code:
        network = own_model.network(name, code, num_classes)
    elif name in SMALL_RESNETS:
        network = CifarResNet(int(name.removeprefix("cifar_resnet")), num_classes)
    elif name in MODELS:
        network = _build_torchvision(name, num_classes, image_size)
    elif timm_networks.is_known(name):
        network = _build_timm(name, num_classes, image_size)
    else:
        raise InputError(f"model={name!r} is unknown{near(name)}")
    if blur_pool:
        _blur(network)
    return network


def _build_torchvision(name: str, num_classes: int, image_size: int) -> nn.Module:
    """Build a network of torchvision that returns only logits.

    The last BatchNorm of each block of a ResNet starts with zero scales, so that the block is the
    identity (Goyal et al. 2017, section 5.1). GoogLeNet and Inception transform their inputs as
    their published weights require.
    """
    from torchvision.models import get_model  # 1.5 s to import: only where it is needed

    options: dict[str, Any] = {}
    if name.startswith(("resnet", "resnext", "wide_resnet")):
        options = {"zero_init_residual": True}
    elif name in ("googlenet", "inception_v3"):
        options = {"aux_logits": False, "transform_input": True, "init_weights": True}
    elif name.startswith("vit_"):
        options = {"image_size": image_size}
    elif name.startswith("maxvit_"):
        options = {"input_size": (image_size, image_size)}
    try:
        network: nn.Module = get_model(name, weights=None, num_classes=num_classes, **options)
    except (ValueError, AssertionError, RuntimeError) as error:
        raise size_error(name, image_size, error) from error
    if name.startswith("mnasnet"):
        # Its own loading needs a version, which only torch.save of the complete dictionary keeps.
        load = functools.partial(nn.Module._load_from_state_dict, network)
        network._load_from_state_dict = load  # type: ignore[method-assign]
    return network


def _build_timm(name: str, num_classes: int, image_size: int) -> nn.Module:
    """Build a network of timm by its plain name, which loads nothing."""
    require("timm", f"model={name}")
    import timm

    plain = name.removeprefix(timm_networks.PREFIX).partition(".")[0]
    sized = timm.is_model(plain) and timm.get_pretrained_cfg_value(plain, "fixed_input_size")
    options: dict[str, Any] = {"img_size": image_size} if sized else {}
    try:
        network: nn.Module = timm.create_model(plain, num_classes=num_classes, **options)
    except (ValueError, AssertionError, RuntimeError, TypeError) as error:
        raise size_error(name, image_size, error) from error
    return network


def adapted(network: nn.Module, name: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return weights as timm itself adapts them, such as positions to another image size."""
    module = sys.modules[type(network).__module__]
    change = getattr(module, "checkpoint_filter_fn", None)
    if not name.startswith(timm_networks.PREFIX) or change is None:
        return tensors
    changed: dict[str, Tensor] = change(tensors, network)
    return changed


def size_error(name: str, size: int, error: Exception) -> InputError:
    """Create the error of a network that fails on images of a size."""
    reason = one_line(error)
    return InputError(
        f"model={name} cannot take images of {size} px ({reason}): set another image_size; most "
        "networks expect 224"
    )


_CPU: Mapping[str, Any] = {"device": "cpu"}
_ON_CPU: Mapping[Any, Mapping[str, Any]] = {
    torch.arange: _CPU,
    torch.linspace: _CPU,
    torch.tensor: _CPU,
}


class _NumbersOnCpu(TorchFunctionMode):
    """Creates on the CPU what networks compute their sizes from, as RegNets do."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call `func`; arguments are those of torch."""
        return func(*args, **{**_ON_CPU.get(func, {}), **(kwargs or {})})


@contextlib.contextmanager
def without_memory() -> Iterator[None]:
    """Within the block networks have shapes and no values: they are on the meta device."""
    with torch.device("meta"), _NumbersOnCpu():
        yield


def heads_of(network: nn.Module) -> tuple[str, ...]:
    """Return the names of the classifier's layers, with a dot at their ends; raise InputError.

    timm names them, several for distillation; else the last linear layer or convolution is it.
    """
    layers: list[str] = [
        f"{name}." for name, m in network.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)
    ]
    if not layers:
        raise InputError(
            "the network has no linear layer or convolution as classifier: end it with "
            "nn.Linear(features, num_classes)"
        )
    named = getattr(network, "pretrained_cfg", {}).get("classifier") or ()
    parts = (named,) if isinstance(named, str) else named
    heads: set[str] = set()
    for part in (*parts, "head_dist"):  # which levit_384_s8 has and does not name
        # A part may have norms, or layers before the last one.
        heads.update([name for name in layers if name.startswith(f"{part}.")][-1:])
    return tuple(sorted(heads, key=layers.index)) or (layers[-1],)


def logits(network: nn.Module, images: Tensor, test_time_flip: bool) -> Tensor:
    """Return the logits of normalised images, averaged with their mirror images if requested."""
    output: Tensor = network(images)
    return (output + network(images.flip(-1))) / 2 if test_time_flip else output


def normalise(images: Tensor, mean: Sequence[float] = MEAN, std: Sequence[float] = STD) -> Tensor:
    """Convert images uint8 [N, 3, H, W] to float32 with mean 0 and deviation 1 per channel."""
    scale, shift = (value.to(images.device).view(1, -1, 1, 1) for value in affine(mean, std))
    return torch.addcmul(shift, images, scale)


def affine(mean: Sequence[float] = MEAN, std: Sequence[float] = STD) -> tuple[Tensor, Tensor]:
    """Return scale and shift per channel, float32 [3], that normalise a byte."""
    scale = torch.tensor([1 / (255 * s) for s in std])
    return scale, torch.tensor([-m / s for m, s in zip(mean, std, strict=True)])


def not_finite(state: Mapping[str, Tensor]) -> str:
    """Return the name of the first tensor with NaN or infinite values; '' without one."""
    for name, value in state.items():
        if value.is_floating_point() and not bool(value.isfinite().all()):
            return name
    return ""


def fit(
    network: nn.Module, state: Mapping[str, Tensor], where: str, name: str, advice: str = ADVICE
) -> None:
    """Load weights from `where` into the network `name`; raise InputError with `advice`."""
    state = dict(state)
    for prefix in WRAPPERS * 2:  # in either order
        consume_prefix_in_state_dict_if_present(state, prefix)
    try:
        network.load_state_dict(state)
    except RuntimeError as error:
        reason = one_line(str(error).partition("\n")[2])
        raise InputError(
            f"the weights in {where} do not fit a {name} ({reason}): {advice}"
        ) from None


def fill(
    network: nn.Module, state: Mapping[str, Tensor], where: str, name: str, advice: str = ADVICE
) -> None:
    """Load weights as `fit` does; also refuse NaN and infinity."""
    fit(network, state, where, name, advice)
    if key := not_finite(state):
        raise InputError(
            f"{where}: {key} is NaN or infinite: training diverged; train again with a lower "
            "learning_rate"
        )
