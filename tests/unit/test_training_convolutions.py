"""Convolutions as matrix products: the same numbers, the same names."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfp_ddp.training.convolutions import Conv2d, use_products

LAYERS: dict[str, tuple[Any, Any, Any]] = {
    "3x3": ((5, 7, 3), {"padding": 1}, (4, 4)),
    "strided": ((5, 7, 3), {"padding": 1, "stride": 2, "bias": False}, (8, 7)),
    "wide kernel": ((3, 6, (5, 3)), {"padding": (2, 0), "stride": (1, 2)}, (6, 9)),
    "rows of eight": ((4, 6, 3), {"padding": 1}, (8, 8)),
    "large": ((4, 6, 3), {"padding": 1}, (12, 12)),
    "pointwise": ((5, 7, 1), {"bias": False}, (20, 20)),
    "pointwise, strided": ((5, 7, 1), {"stride": 2}, (9, 12)),
    "pointwise, padded": ((5, 7, 1), {"padding": 1}, (3, 3)),
}


def gradients(layer: nn.Module, images: Tensor) -> list[Tensor]:
    """The output, and the gradients of its weighted sum: of the images and of the weights."""
    images = images.clone(memory_format=torch.channels_last).requires_grad_()
    out = layer(images)
    scales = torch.arange(out.numel(), dtype=out.dtype).sin().view(out.shape)
    torch.autograd.backward((out * scales).sum())
    return [out.detach(), *(t.grad for t in (images, *layer.parameters()) if t.grad is not None)]


@pytest.mark.parametrize("name", LAYERS)
def test_product_equals_the_convolution(name: str) -> None:
    """Output and gradients in float64, whatever the kernel's shape, stride and padding."""
    torch.manual_seed(1)
    arguments, more, size = LAYERS[name]
    layer = nn.Conv2d(*arguments, **more).double().to(memory_format=torch.channels_last)
    images = torch.randn(3, arguments[0], *size, dtype=torch.float64)
    expected = gradients(copy.deepcopy(layer), images)
    use_products(layer)
    assert isinstance(layer, Conv2d)
    found = gradients(layer, images)
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_gradients_have_the_type_of_the_weights() -> None:
    """As close to float32 as a convolution's own kernel is under autocast."""
    torch.manual_seed(1)
    layer = nn.Conv2d(64, 64, 3, padding=1).to(memory_format=torch.channels_last)
    images = torch.randn(8, 64, 2, 2)
    exact = gradients(copy.deepcopy(layer), images)
    with torch.autocast("cpu", torch.bfloat16):
        own = gradients(copy.deepcopy(layer), images)
        use_products(layer)
        found = gradients(layer, images)
    assert [t.dtype for t in found] == [t.dtype for t in own]
    assert found[0].dtype == torch.bfloat16
    for mine, theirs, truth in zip(found, own, exact, strict=True):
        error, usual = ((t.float() - truth).abs().max() for t in (mine, theirs))
        assert error <= 1.5 * usual + 1e-3


def test_only_plain_convolutions_are_changed() -> None:
    """Names and weights stay, and a copy computes with weights of its own."""
    plain, grouped, same = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1, groups=2), nn.Conv2d(4, 4, 1)
    same.padding = "same"
    network = nn.Sequential(
        plain, grouped, nn.Conv2d(4, 4, 3, dilation=2), same, nn.Conv1d(4, 4, 1)
    )
    names = list(network.state_dict())
    use_products(network)
    assert [isinstance(layer, Conv2d) for layer in network] == [True, False, False, False, False]
    assert list(network.state_dict()) == names
    other = copy.deepcopy(plain)
    with torch.no_grad():
        other.weight.zero_()
    images = torch.ones(1, 4, 2, 2)
    assert not torch.equal(plain(images), other(images))
