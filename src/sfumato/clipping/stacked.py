"""Clipped sums at many parameter sets side by side, in closed form: for small plain networks.

`func.clipped_sum` under `torch.func.vmap` does the same for every model, but holds each example's
whole gradient in memory. Here that of a linear layer is never formed: it is the product of two vectors,
so its norm is the product of theirs (Goodfellow 2015), and the sum is one matrix product.

Columns and pooling of many small feature maps are several times as fast on a CPU as PyTorch's, which go through one
pixel after another; these copy rows of pixels. Values and gradients are PyTorch's, of finite maps and gradients: up to
the sign of a zero. Where a map or a gradient is not finite, which pixel gets what may differ; then the norm of that
image's own gradient is not finite either.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from sfumato.clipping.clip import Clip, global_norms
from sfumato.clipping.graph.rules.convolution import windows

# Of each layer with parameters: its number, its input, its output.
_Site = tuple[int, torch.Tensor, torch.Tensor]


class Stacked:
    """One architecture, for M parameter sets at once.

    Args:
        model: A convolution, then other plain layers, as `sfumato.models.small.LeNet`; maps are square. Gives the
            formula; none of its parameters is read.
    """

    def __init__(self, model: nn.Sequential) -> None:
        assert {type(layer) for layer in model} <= {nn.Conv2d, nn.Linear, nn.MaxPool2d, nn.Flatten, nn.ReLU, nn.Tanh}
        self._layers: list[Any] = list(model)

    def losses(
        self, parameters: Mapping[str, torch.Tensor], images: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        """Cross-entropy of each model on each of its examples, (M, B).

        Args:
            parameters: Name -> (M, ...).
            images: (M, B, C, H, W).
            labels: (M, B).
        """
        with torch.no_grad():
            return _cross_entropy(self._forward(parameters, images)[0], labels)

    def clipped_sum(
        self,
        parameters: Mapping[str, torch.Tensor],
        images: torch.Tensor,
        labels: torch.Tensor,
        is_real: torch.Tensor,
        *,
        clipping_norm: float,
    ) -> dict[str, torch.Tensor]:
        """For each model, the sum of its examples' clipped gradients, divided by C: of sensitivity 1.

        Guarantee: as `sfumato.clipping.func.clipped_sum`: an example moves the sum by at most 1
        in L2 norm, up to float rounding, and one that is no real one, or whose loss or norm is not
        finite, contributes exactly zero.

        Args:
            parameters: Name -> (M, ...), float32 or float64.
            images: (M, B, C, H, W).
            labels: (M, B).
            is_real: (M, B); False for padding.
            clipping_norm: C.

        Returns:
            Name -> (M, ...), of the parameters' shapes and types.
        """
        with torch.enable_grad():
            outputs, sites = self._forward(parameters, images)
            losses = _cross_entropy(outputs, labels)
            grads = torch.autograd.grad(losses.sum(), [site_output for _, _, site_output in sites])
        with torch.no_grad():
            sums = _sums(sites, grads, losses, is_real, Clip(clipping_norm, True))
            return {name: sums[name].view_as(parameter) for name, parameter in parameters.items()}

    def _forward(
        self, parameters: Mapping[str, torch.Tensor], images: torch.Tensor
    ) -> tuple[torch.Tensor, list[_Site]]:
        """(M, B, classes), and the sites."""
        values, sites = images, []
        for number, layer in enumerate(self._layers):
            if isinstance(layer, nn.Conv2d | nn.Linear):
                weight, bias = parameters[f"{number}.weight"], parameters[f"{number}.bias"]
                inputs = values
                if isinstance(layer, nn.Linear):
                    outputs = torch.baddbmm(bias.unsqueeze(1), inputs, weight.mT)
                else:
                    inputs = columns_of(layer, values.flatten(0, 1)).unflatten(0, values.shape[:2])
                    outputs = (weight.flatten(2).unsqueeze(1) @ inputs).add_(bias[:, None, :, None])  # (M, B, O, L)
                if not outputs.requires_grad:
                    outputs.requires_grad_()
                sites.append((number, inputs.detach(), outputs))
                side = math.isqrt(outputs.shape[-1])
                values = outputs.unflatten(3, (side, side)) if isinstance(layer, nn.Conv2d) else outputs
            elif isinstance(layer, nn.MaxPool2d):
                values = max_pool(layer, values.flatten(0, 1)).unflatten(0, values.shape[:2])
            else:
                values = values.flatten(2) if isinstance(layer, nn.Flatten) else layer(values)
        return values, sites


def _sums(
    sites: list[_Site], grads: tuple[torch.Tensor, ...], losses: torch.Tensor, is_real: torch.Tensor, clip: Clip
) -> dict[str, torch.Tensor]:
    """From the gradients of the layers' outputs to the clipped sums."""
    size = losses.numel()
    # Of each layer: its gradients and inputs (linear), or each example's gradient of its weight and bias.
    parts, norms = {}, []
    for (number, inputs, _), grad in zip(sites, grads, strict=True):
        if grad.ndim == 3:  # linear: (M, B, O)
            parts[number] = grad, inputs
            norm = torch.linalg.vector_norm(grad, dim=2)
            norms += [(norm * torch.linalg.vector_norm(inputs, dim=2)).view(size, 1), norm.view(size, 1)]
        else:
            parts[number] = grad @ inputs.mT, grad.sum(3)  # (M, B, O, n), (M, B, O)
            norms += [part.view(size, -1) for part in parts[number]]
    norm = global_norms(norms).view_as(losses)
    finite = norm.isfinite() & losses.isfinite()
    coefficients = torch.where(finite & is_real, clip(norm), 0.0)  # (M, B)
    found = {}
    for number, (first, second) in parts.items():
        if not finite.all():  # a coefficient of zero does not silence what is not finite: 0 * NaN is NaN
            first, second = (
                torch.where(finite[(..., *[None] * (each.ndim - 2))], each, 0.0) for each in (first, second)
            )
        if first.ndim == 3:
            scaled = first * coefficients[..., None]
            found[f"{number}.weight"], found[f"{number}.bias"] = scaled.mT @ second, scaled.sum(1)
        else:
            shape = (len(losses), *first.shape[2:])
            found[f"{number}.weight"] = (coefficients.unsqueeze(1) @ first.flatten(2)).view(shape)
            found[f"{number}.bias"] = (coefficients.unsqueeze(1) @ second).squeeze(1)
    return found


def _cross_entropy(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)


def columns_of(layer: nn.Conv2d, images: torch.Tensor) -> torch.Tensor:
    """What a plain convolution multiplies: (N, C, H, W) -> (N, n, L), as `F.unfold`. The kernel fits into the image."""
    return _Columns.apply(images, layer.kernel_size, layer.padding, layer.stride)


def max_pool(layer: nn.MaxPool2d, images: torch.Tensor) -> torch.Tensor:
    """(N, C, H, W) -> (N, C, h, w), as the layer; where values of a window are equal, the first one has the gradient.
    There is a window at least.
    """
    return _Halved.apply(images) if layer.extra_repr() == nn.MaxPool2d(2).extra_repr() else layer(images)


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: torch.Tensor, kernel: Any, padding: Any, stride: Any) -> torch.Tensor:
        ctx.of = images.shape[2:], kernel, padding, stride
        seen = windows(images[:, None], kernel, stride, padding, [1, 1])[:, 0]  # (N, C, h, w, k, k')
        return seen.permute(0, 1, 4, 5, 2, 3).flatten(4).flatten(1, 3)  # copied a row of pixels at a time

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        size, kernel, padding, stride = ctx.of
        return F.fold(grads[0], size, kernel, padding=padding, stride=stride), None, None, None


class _Halved(torch.autograd.Function):
    """The largest of each two by two pixels."""

    @staticmethod
    def forward(ctx: Any, images: torch.Tensor) -> torch.Tensor:
        one, two, three, four = _corners(images)
        upper, lower = torch.maximum(one, two), torch.maximum(three, four)
        ctx.shape = images.shape
        ctx.save_for_backward(two > one, four > three, lower > upper)
        return torch.maximum(upper, lower)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        is_two, is_four, is_lower = ctx.saved_tensors
        (pooled,) = grads
        found = pooled.new_zeros(ctx.shape)
        lower = pooled * is_lower
        upper = pooled - lower
        two, four = upper * is_two, lower * is_four
        for corner, grad in zip(_corners(found), (upper - two, two, lower - four, four), strict=True):
            corner.copy_(grad)
        return found


def _corners(maps: torch.Tensor) -> list[torch.Tensor]:
    """Of each window of two by two pixels, the first, ..., the fourth; an odd last row or column has no window."""
    height, width = (side // 2 * 2 for side in maps.shape[2:])
    return [maps[:, :, row:height:2, column:width:2] for row in range(2) for column in range(2)]
