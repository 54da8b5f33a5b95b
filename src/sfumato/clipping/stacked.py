"""Clipped sums at many parameter sets side by side, in closed form: for small plain networks.

`functional.clipped_sum` under `torch.func.vmap` does the same for every model, but holds each example's
whole gradient in memory. Here that of a linear layer is never formed: it is the product of two vectors,
so its norm is the product of theirs (Goodfellow 2015), and the sum is one matrix product.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from sfumato.clipping.clip import Clip, global_norms
from sfumato.clipping.small_maps import columns_of, max_pool

_PLAIN = (nn.ReLU, nn.Tanh)


def is_stackable(model: nn.Module) -> bool:
    """Whether `Stacked` takes the model: a sequence of plain layers, the first a convolution. Images must be
    square.
    """
    if not isinstance(model, nn.Sequential) or not model or not isinstance(model[0], nn.Conv2d):
        return False
    return all(
        _is_plain_convolution(layer)
        if isinstance(layer, nn.Conv2d)
        else layer.bias is not None
        if isinstance(layer, nn.Linear)
        else isinstance(layer, _PLAIN)
        or (isinstance(layer, nn.MaxPool2d) and _is_square(layer.kernel_size, layer.stride, layer.padding))
        or (isinstance(layer, nn.Flatten) and layer.start_dim == 1)
        for layer in model
    )


class Stacked:
    """One architecture, for M parameter sets at once.

    Args:
        model: `is_stackable`. Gives the formula; none of its parameters is read.
    """

    def __init__(self, model: nn.Sequential) -> None:
        assert is_stackable(model)
        self._layers: list[Any] = list(model)

    def columns(self, images: torch.Tensor) -> torch.Tensor:
        """What the first layer multiplies of each image: (N, n, L) of (N, C, H, W). It belongs to the
        images alone, so it is computed once for all steps.
        """
        return columns_of(self._layers[0], images)

    def losses(
        self, parameters: Mapping[str, torch.Tensor], columns: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        """Cross-entropy of each model on each of its examples, (M, B).

        Args:
            parameters: Name -> (M, ...).
            columns: (M, B, n, L).
            labels: (M, B).
        """
        with torch.no_grad():
            return _cross_entropy(self._forward(parameters, columns)[0], labels)

    def clipped_sum(
        self,
        parameters: Mapping[str, torch.Tensor],
        columns: torch.Tensor,
        labels: torch.Tensor,
        is_real: torch.Tensor,
        *,
        clipping_norm: float,
    ) -> dict[str, torch.Tensor]:
        """For each model, the sum of its examples' clipped gradients, divided by C: of sensitivity 1.

        Guarantee: as `sfumato.clipping.functional.clipped_sum`: an example moves the sum by at most 1
        in L2 norm, up to float rounding, and one that is no real one, or whose loss or norm is not
        finite, contributes exactly zero.

        Args:
            parameters: Name -> (M, ...), float32 or float64.
            columns: (M, B, n, L), as `columns` makes them of the examples.
            labels: (M, B).
            is_real: (M, B); False for padding.
            clipping_norm: C.

        Returns:
            Name -> (M, ...), of the parameters' shapes and types.
        """
        with torch.enable_grad():
            outputs, sites = self._forward(parameters, columns)
            losses = _cross_entropy(outputs, labels)
            grads = torch.autograd.grad(losses.sum(), [site_output for _, _, site_output in sites])
        with torch.no_grad():
            sums = _sums(sites, grads, losses, is_real, Clip(clipping_norm, True))
            return {name: sums[name].view_as(parameter) for name, parameter in parameters.items()}

    def _forward(
        self, parameters: Mapping[str, torch.Tensor], columns: torch.Tensor
    ) -> tuple[torch.Tensor, list["_Site"]]:
        """(M, B, classes), and of each layer with parameters: its number, its input, its output."""
        values, sites = columns, []
        for number, layer in enumerate(self._layers):
            if isinstance(layer, nn.Conv2d | nn.Linear):
                weight, bias = parameters[f"{number}.weight"], parameters[f"{number}.bias"]
                if isinstance(layer, nn.Linear):
                    inputs, outputs = values, torch.baddbmm(bias.unsqueeze(1), values, weight.mT)
                else:
                    inputs = values  # (M, B, n, L)
                    if number:
                        inputs = columns_of(layer, values.flatten(0, 1)).unflatten(0, values.shape[:2])
                    outputs = (weight.flatten(2).unsqueeze(1) @ inputs).add_(bias[:, None, :, None])  # (M, B, O, L)
                if not outputs.requires_grad:
                    outputs.requires_grad_()
                sites.append((number, inputs.detach(), outputs))
                values = outputs
                if isinstance(layer, nn.Conv2d):
                    side = math.isqrt(outputs.shape[3])
                    values = outputs.unflatten(3, (side, side))
            elif isinstance(layer, nn.MaxPool2d):
                values = max_pool(layer, values.flatten(0, 1)).unflatten(0, values.shape[:2])
            elif isinstance(layer, nn.Flatten):
                values = values.flatten(2)
            else:
                values = layer(values)
        return values, sites


_Site = tuple[int, torch.Tensor, torch.Tensor]


def _sums(
    sites: list[_Site],
    grads: tuple[torch.Tensor, ...],
    losses: torch.Tensor,
    is_real: torch.Tensor,
    clip: Clip,
) -> dict[str, torch.Tensor]:
    """From the gradients of the layers' outputs to the clipped sums."""
    size = losses.numel()
    # Of each layer: its inputs and gradients (linear), or each example's gradient of its weight and bias.
    parts, norms = [], []
    for (_, inputs, _), grad in zip(sites, grads, strict=True):
        if grad.ndim == 3:  # linear: (M, B, O)
            norm = torch.linalg.vector_norm(grad, dim=2)
            norms.append((norm * torch.linalg.vector_norm(inputs, dim=2)).view(size, 1))
            norms.append(norm.view(size, 1))
            parts.append((grad, inputs))
        else:
            of_weight, of_bias = grad @ inputs.mT, grad.sum(3)  # (M, B, O, n), (M, B, O)
            norms += [of_weight.view(size, -1), of_bias.view(size, -1)]
            parts.append((of_weight, of_bias))
    norm = global_norms(norms).view_as(losses)
    finite = norm.isfinite() & losses.isfinite()
    coefficients = torch.where(finite & is_real, clip(norm), 0.0)  # (M, B)
    if not finite.all():  # a coefficient of zero does not silence what is not finite: 0 * NaN is NaN

        def silenced(each: torch.Tensor) -> torch.Tensor:
            return torch.where(finite.view(*finite.shape, *[1] * (each.ndim - 2)), each, 0.0)

        parts = [(silenced(first), silenced(second)) for first, second in parts]
    found = {}
    for (number, *_), (first, second) in zip(sites, parts, strict=True):
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


def _is_plain_convolution(layer: nn.Conv2d) -> bool:
    return (
        layer.groups == 1
        and layer.dilation == (1, 1)
        and layer.padding_mode == "zeros"
        and not isinstance(layer.padding, str)
        and _is_square(layer.kernel_size, layer.stride, layer.padding)
        and layer.bias is not None
    )


def _is_square(*sizes: Any) -> bool:
    """Then square maps stay square."""
    return all(isinstance(size, int) or len(set(size)) == 1 for size in sizes)
