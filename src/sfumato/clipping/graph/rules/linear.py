"""Linear layers: per-example gradients written out, or only their norms (ghost norms, Goodfellow
2015; Li et al. 2022).
"""

from collections.abc import Callable

import torch

from sfumato.clipping.clip import at_least_float32, hidden, one_thread, products, roundings, unit
from sfumato.clipping.graph.rules.site import MaterializedGrads, SiteRecord
from sfumato.torch_internals import linear as quick_linear

_InnerProducts = Callable[[torch.Tensor], torch.Tensor]
# Of so few positions some CPUs multiply a transpose that is written out twice as fast as one that
# is read as it lies.
_FEW_POSITIONS = 64
# Of fewer still, with many features, those are at their best with so many rows at once: 17
# positions take half the time.
_MOST_IN_BLOCKS, _LEAST_IN_BLOCKS, _BLOCK = 40, 128, 8
# So many features at once: of few positions, smaller parts would cost more time than their smaller
# rounding is worth.
_FEATURES = 384


def bias(record: SiteRecord, argument: str) -> MaterializedGrads:
    """The output's gradient summed over positions."""
    return MaterializedGrads(record.example_grad().flatten(1, -2).sum(dim=1))


def rows(record: SiteRecord, argument: str) -> MaterializedGrads:
    """A batched matrix product."""
    grads, inputs = _sides(record)
    return MaterializedGrads(torch.bmm(grads.transpose(1, 2), inputs))


def ghost(record: SiteRecord, argument: str) -> "GhostGrads":
    """Norms from inner products of positions; the clipped sum as one matrix product."""
    grads, inputs = _sides(record)
    return GhostGrads(inputs, grads, gram)


def ghost_at_once(record: SiteRecord, argument: str) -> "GhostGrads":
    """The same, all inner products of an image at once, however few: the fastest on other CPUs."""
    grads, inputs = _sides(record)
    return GhostGrads(inputs, grads, gram_at_once)


def is_divided(record: SiteRecord) -> bool:
    """Whether `ghost` differs from `ghost_at_once`."""
    grad = record.example_grad()
    return grad.device.type == "cpu" and 1 < grad.shape[1:-1].numel() < _FEW_POSITIONS


def gram_values(record: SiteRecord) -> int:
    """Numbers that `ghost` keeps at its peak."""
    grads, inputs = _sides(record)
    positions = grads.shape[1]
    return 2 * record.examples * positions * (positions + max(grads.shape[2], inputs.shape[2]))


def gram(rows: torch.Tensor) -> torch.Tensor:
    """(m, positions, positions) inner products of (m, positions, features)."""
    positions, features = rows.shape[1:]
    transposed = rows.transpose(1, 2)
    if rows.device.type == "cpu" and positions <= _MOST_IN_BLOCKS and features >= _LEAST_IN_BLOCKS:
        blocks = rows.chunk(-(-positions // _BLOCK), dim=1)
        return torch.cat([products(block, transposed, _FEATURES) for block in blocks], dim=1)
    if rows.device.type == "cpu" and positions < _FEW_POSITIONS:
        transposed = transposed.contiguous()
    return products(rows, transposed, _FEATURES)


def gram_at_once(rows: torch.Tensor) -> torch.Tensor:
    """The same of all rows at once, of the transpose as it lies."""
    return products(rows, rows.transpose(1, 2), _FEATURES)


def _sides(record: SiteRecord) -> tuple[torch.Tensor, torch.Tensor]:
    """The output's gradient and the input, (m, positions, features) each."""
    return record.example_grad().flatten(1, -2), record.example_arg("input").flatten(1, -2)


class GhostGrads:
    """Per-example gradients grads' inputs that are never written out."""

    def __init__(self, inputs: torch.Tensor, grads: torch.Tensor, inner_products: _InnerProducts) -> None:
        # Norms and the sum see the very same products, none of them rounded to less than float32.
        self.inputs, self.grads = at_least_float32(inputs), at_least_float32(grads)
        self._squares = self._square_norms(inner_products)  # now: the gradient is in the processor's cache

    def square_norms(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._squares

    def _square_norms(self, inner_products: _InnerProducts) -> tuple[torch.Tensor, torch.Tensor]:
        (_, positions, wide), outputs = self.inputs.shape, self.grads.shape[2]
        times = roundings(wide, _FEATURES) + roundings(outputs, _FEATURES) + 1 + 2 * roundings(positions)
        share = unit(self.grads) * times
        of_inputs, of_grads = hidden(wide, share, self.grads), hidden(outputs, share, self.grads)
        if positions == 1:
            inputs, grads = self.inputs.square().sum(dim=(1, 2)), self.grads.square().sum(dim=(1, 2))
            return inputs * grads, share * (inputs + of_inputs) * (grads + of_grads)
        inputs, grads = inner_products(self.inputs), inner_products(self.grads)
        # |sum of x_t d_t| <= sum of |x_t| |d_t|: what the terms could have been that cancelled, and
        # so what roundings are a share of.
        squares = (inputs.diagonal(dim1=1, dim2=2) + of_inputs) * (grads.diagonal(dim1=1, dim2=2) + of_grads)
        largest = torch.linalg.vector_norm(squares, 0.5, dim=1)  # the square of a sum of roots
        terms = inputs * grads  # their sum over pairs of positions is the square
        return terms.sum(2).sum(1).clamp(min=0), share * largest

    def weighted_sum(self, coefficients: torch.Tensor) -> torch.Tensor:
        grads, inputs = self.grads, self.inputs
        weights = coefficients.to(grads.dtype)[:, None, None]
        is_narrower = inputs.shape[2] < grads.shape[2]  # the narrower side is less work
        with one_thread(min(inputs.numel(), grads.numel())):
            inputs, grads = (inputs * weights, grads) if is_narrower else (inputs, grads * weights)
        return quick_linear(grads.flatten(0, 1).T, inputs.flatten(0, 1).T)
