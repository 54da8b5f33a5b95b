"""Linear layers: per-example gradients written out, or only their norms (ghost norms, Goodfellow 2015; Li et al. 2022)."""

import torch

from sfumato.clipping.rules.contribution import Rows, at_least_float32
from sfumato.clipping.rules.meeting import Met

# Rounding of a squared norm from inner products, in units of the machine epsilon and of the sum
# of the absolute values of its terms, as if all roundings went one way.
GRAM_ROUNDING = 2.0


def bias(met: Met, slot: str) -> Rows:
    """The output's gradient summed over positions."""
    return Rows(met.example_grad().flatten(1, -2).sum(dim=1))


def rows(met: Met, slot: str) -> Rows:
    """A batched matrix product."""
    return Rows(torch.bmm(_positions(met.example_grad()).transpose(1, 2), _positions(met.example_arg("input"))))


def ghost(met: Met, slot: str) -> "Ghost":
    """Norms from inner products of positions; the clipped sum as one matrix product."""
    return Ghost(_positions(met.example_arg("input")), _positions(met.example_grad()))


def gram_values(met: Met) -> int:
    """Numbers that `ghost` keeps at its peak."""
    grads, inputs = _positions(met.example_grad()), _positions(met.example_arg("input"))
    positions = grads.shape[1]
    return 2 * met.examples * positions * (positions + max(grads.shape[2], inputs.shape[2]))


def gram(rows: torch.Tensor) -> torch.Tensor:
    """(m, positions, positions) inner products of (m, positions, features)."""
    # Written out, the transpose makes the product five times faster on a CPU.
    return torch.bmm(rows, rows.transpose(1, 2).contiguous())


def _positions(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten(1, -2)  # (m, positions, features)


class Ghost:
    """Per-example gradients grads' inputs that are never written out."""

    def __init__(self, inputs: torch.Tensor, grads: torch.Tensor) -> None:
        # Norms and the sum see the very same products, none of them rounded to less than float32.
        self.inputs, self.grads = at_least_float32(inputs), at_least_float32(grads)

    def square_norms(self) -> tuple[torch.Tensor, torch.Tensor]:
        eps = torch.finfo(self.grads.dtype).eps
        if self.inputs.shape[1] == 1:
            squares = self.inputs.square().sum(dim=(1, 2)) * self.grads.square().sum(dim=(1, 2))
            return squares, torch.zeros_like(squares)
        # Inner products of the narrower side, carried over the wider: sum_ts (x_t.x_s)(d_t.d_s) = sum_t d_t.(G d)_t.
        narrow, wide = sorted((self.inputs, self.grads), key=lambda side: side.shape[2])
        products = gram(narrow)
        squares = (torch.bmm(products, wide) * wide).sum(dim=(1, 2)).clamp(min=0)
        lengths = products.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt() * torch.linalg.vector_norm(wide, dim=2)
        # |sum of x_t d_t| <= sum of |x_t| |d_t|: what the terms could have been that cancelled.
        return squares, GRAM_ROUNDING * eps * lengths.sum(1).square()

    def weighted_sum(self, coefficients: torch.Tensor, counts: torch.Tensor | None) -> torch.Tensor:
        grads, inputs = self.grads, self.inputs
        if counts is not None:  # a coefficient of zero does not silence it: 0 * NaN is NaN
            mask = counts[:, None, None]
            grads, inputs = torch.where(mask, grads, 0.0), torch.where(mask, inputs, 0.0)
        weights = coefficients.to(grads.dtype)[:, None, None]
        if inputs.shape[2] < grads.shape[2]:  # the narrower side is less work
            inputs = inputs * weights
        else:
            grads = grads * weights
        return grads.flatten(0, 1).T @ inputs.flatten(0, 1)

    def rows_of(self, examples: torch.Tensor) -> torch.Tensor:
        return torch.bmm(self.grads[examples].transpose(1, 2), self.inputs[examples])
