"""Convolutions as matrix products, where these are faster on a CPU.

oneDNN computes a convolution row by row of its output, which is slow for short rows: ResNet-18 at
64 pixels spends most of a step in the weight gradients of its last blocks, 2 x 2 large.
"""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

SHORT = 8
"""Pixels in a row of the output up to which a product is faster, with AVX2, AVX-512 and AMX."""
SHORTER = 4
"""As SHORT, for the gradient of the images: its sums over the kernel are not a product."""
Pair = tuple[int, int]


def use_products(network: nn.Module) -> None:
    """Let plain convolutions on a CPU compute as products if faster; only sums are reordered."""
    for module in network.modules():
        if (
            type(module) is nn.Conv2d
            and (module.groups, module.dilation, module.padding_mode) == (1, (1, 1), "zeros")
            and not isinstance(module.padding, str)
        ):
            module.__class__ = Conv2d


class Conv2d(nn.Conv2d):
    """A convolution that is a matrix product for 1 x 1 kernels and small outputs."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # noqa: A002
        images = input
        size = self.kernel_size
        stride = self.stride
        padding = self.padding
        assert not isinstance(padding, str)
        width = (images.shape[-1] + 2 * padding[1] - size[1]) // stride[1] + 1
        pointwise = size == (1, 1) and padding == (0, 0)
        is_faster = pointwise or 0 < width <= SHORT
        if images.ndim != 4 or not is_faster:
            return super()._conv_forward(images, weight, bias)  # type: ignore[no-any-return]
        if torch.is_autocast_enabled("cpu"):
            kind = torch.get_autocast_dtype("cpu")
            images = images.to(kind)
            weight = weight.to(kind)
            bias = None if bias is None else bias.to(kind)
        out: Tensor = _Product.apply(images, weight, bias, stride, padding)
        return out


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, images: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair
    ) -> Tensor:
        ctx.save_for_backward(images, weight)
        ctx.stride = stride
        ctx.padding = padding
        patches = _patches(images, weight, stride, padding)
        return F.linear(patches, _rows(weight), bias).permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        images, weight = ctx.saved_tensors
        how = (ctx.stride, ctx.padding)
        of_images, of_weight, of_bias = ctx.needs_input_grad[:3]
        rows = grads[0].permute(0, 2, 3, 1).reshape(-1, len(weight))
        grad_of_weight = None
        if of_weight:
            outputs, channels, high, wide = weight.shape
            patches = _patches(images, weight, *how).reshape(len(rows), -1)
            product = (rows.t() @ patches).view(outputs, high, wide, channels)
            grad_of_weight = product.permute(0, 3, 1, 2)
        return (
            _grad_of_images(grads[0], images, weight, *how) if of_images else None,
            grad_of_weight,
            rows.sum(0) if of_bias else None,
            None,
            None,
        )


def _patches(images: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> Tensor:
    """Return the input of each output pixel: [N, H, W, kernel height x width x channels]."""
    high, wide = weight.shape[2:]
    down, across = stride
    pixels = images.permute(0, 2, 3, 1)
    if high == wide == 1 and padding == (0, 0):
        return pixels[:, ::down, ::across]
    if padding != (0, 0):
        pixels = F.pad(pixels, (0, 0, padding[1], padding[1], padding[0], padding[0]))
    windows = pixels.unfold(1, high, down).unfold(2, wide, across)
    return windows.permute(0, 1, 2, 4, 5, 3).flatten(3)


def _rows(weight: Tensor) -> Tensor:
    """Return [outputs, kernel height x width x channels], a view for channels-last weights."""
    return weight.permute(0, 2, 3, 1).flatten(1)


def _grad_of_images(
    grad: Tensor, images: Tensor, weight: Tensor, stride: Pair, padding: Pair
) -> Tensor:
    high, wide = weight.shape[2:]
    down, across = stride
    top, left = padding
    count, _, height, width = images.shape
    rows, columns = grad.shape[2:]
    if columns > SHORTER and (high, wide) != (1, 1):
        dilation = (1, 1)
        transposed = False
        wanted = (True, False, False)
        result: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
            grad, images, weight, None, stride, padding, dilation, transposed, (0, 0), 1, wanted
        )
        return result[0]
    products = grad.permute(0, 2, 3, 1) @ _rows(weight)
    if (high, wide, *stride, *padding) == (1, 1, 1, 1, 0, 0):
        return products.permute(0, 3, 1, 2)
    products = products.view(count, rows, columns, high, wide, -1)
    # Summed in float32 at least, as a convolution kernel does.
    kind = torch.promote_types(grad.dtype, torch.float32)
    shape = (count, height + 2 * top, width + 2 * left, images.shape[1])
    total = torch.zeros(shape, dtype=kind, device=grad.device)
    for y in range(high):
        for x in range(wide):
            window = total[:, y : y + down * rows : down, x : x + across * columns : across]
            window += products[:, :, :, y, x]
    inside = total[:, top : top + height, left : left + width]
    return inside.to(images.dtype).permute(0, 3, 1, 2)
