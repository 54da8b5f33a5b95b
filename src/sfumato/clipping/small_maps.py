"""Columns and pooling of many small feature maps, several times as fast on a CPU as PyTorch's, which go through one
pixel after another; these copy rows of pixels.

Values and gradients are PyTorch's, of finite maps and gradients: up to the sign of a zero. Where a map or a gradient is
not finite, which pixel gets what may differ; then the norm of that image's own gradient is not finite either.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


def columns_of(layer: nn.Conv2d, images: torch.Tensor) -> torch.Tensor:
    """What a plain convolution multiplies: (N, C, H, W) -> (N, n, L), as `F.unfold`. The kernel fits into the image."""
    return _Columns.apply(images, layer.kernel_size, layer.padding, layer.stride)


def max_pool(layer: nn.MaxPool2d, images: torch.Tensor) -> torch.Tensor:
    """(N, C, H, W) -> (N, C, h, w), as the layer; where values of a window are equal, the first one has the gradient.
    There is a window at least.
    """
    halves = layer.kernel_size in (2, (2, 2)) and layer.stride in (2, (2, 2)) and layer.padding in (0, (0, 0))
    if halves and layer.dilation in (1, (1, 1)) and not layer.ceil_mode and not layer.return_indices:
        return _Halved.apply(images)
    return layer(images)


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        images: torch.Tensor,
        kernel: tuple[int, int],
        padding: tuple[int, int],
        stride: tuple[int, int],
    ) -> torch.Tensor:
        ctx.of = images.shape[2:], kernel, padding, stride
        padded = F.pad(images, (padding[1], padding[1], padding[0], padding[0])) if any(padding) else images
        number, channels, *sizes = padded.shape
        counts = [(size - k) // s + 1 for size, k, s in zip(sizes, kernel, stride, strict=True)]
        reached = [(count - 1) * s + 1 for count, s in zip(counts, stride, strict=True)]
        # (N, C, k, k', h, w): for each place in the kernel, all pixels that it meets.
        met = padded.unfold(2, reached[0], 1).unfold(3, reached[1], 1)[:, :, : kernel[0], : kernel[1]]
        met = met[..., :: stride[0], :: stride[1]]
        return met.reshape(number, channels * kernel[0] * kernel[1], counts[0] * counts[1])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        size, kernel, padding, stride = ctx.of
        return F.fold(grads[0], size, kernel, padding=padding, stride=stride), None, None, None


class _Halved(torch.autograd.Function):
    """The largest of each two by two pixels."""

    @staticmethod
    def forward(ctx: Any, images: torch.Tensor) -> torch.Tensor:
        height, width = images.shape[2] // 2 * 2, images.shape[3] // 2 * 2  # an odd last row or column has no window
        one, two = images[:, :, 0:height:2, 0:width:2], images[:, :, 0:height:2, 1:width:2]
        three, four = images[:, :, 1:height:2, 0:width:2], images[:, :, 1:height:2, 1:width:2]
        upper, lower = torch.maximum(one, two), torch.maximum(three, four)
        ctx.shape = images.shape
        ctx.save_for_backward(two > one, four > three, lower > upper)
        return torch.maximum(upper, lower)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        is_two, is_four, is_lower = ctx.saved_tensors
        height, width = ctx.shape[2] // 2 * 2, ctx.shape[3] // 2 * 2
        found = grads[0].new_empty(ctx.shape) if (height, width) == ctx.shape[2:] else grads[0].new_zeros(ctx.shape)
        lower = grads[0] * is_lower
        upper = grads[0] - lower
        two, four = upper * is_two, lower * is_four
        found[:, :, 0:height:2, 0:width:2], found[:, :, 0:height:2, 1:width:2] = upper - two, two
        found[:, :, 1:height:2, 0:width:2], found[:, :, 1:height:2, 1:width:2] = lower - four, four
        return found
