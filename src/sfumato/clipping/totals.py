"""What all meetings together make: each example's norm, and the clipped sum for each parameter."""

from collections.abc import Callable

import torch

from sfumato.clipping.assumptions import assume
from sfumato.clipping.rules import Contribution, Rows
from sfumato.clipping.weights import Weights

# What roundings could add to a norm, if all went one way, is added to it as far as it is more than this share;
_TOLERANCE = 1e-4
# where it is more than this, the norm is computed again in float64.
_MOST_RAISED = 1e-3
# So many examples together: their gradients may have to be written out for it.
_AT_ONCE = 4
# Written-out gradients of no more values than this lie side by side: one norm and one product for all of them.
_FEW = 4096


class Totals:
    """Per-example gradients with respect to all parameters.

    Args:
        contributions: To each weight's gradients.
    """

    def __init__(self, weights: Weights, contributions: dict[str, Contribution]) -> None:
        self._weights, self._contributions = weights, contributions
        small: dict[torch.dtype, dict[str, torch.Tensor]] = {}
        for group in weights.traced.groups:
            contribution = contributions[group.weights[0]]
            if group.kind == "parameter" and isinstance(contribution, Rows) and contribution.shape.numel() <= _FEW:
                rows = contribution.written_out()
                rows = rows.reshape(len(rows), -1)
                small.setdefault(rows.dtype, {})[group.weights[0]] = rows
        # Weights' names, numbers of values, and their gradients side by side.
        self._small = [
            (list(parts), [part.shape[1] for part in parts.values()], Rows(torch.cat(list(parts.values()), 1))) for parts in small.values()
        ]
        self._alone = {*contributions} - {name for names, _, _ in self._small for name in names}

    def norms(self) -> torch.Tensor:
        """(m,) L2 norms."""
        exact = [rows.square_norms()[0] for _, _, rows in self._small]
        for group in self._weights.traced.groups:
            own = [self._contributions[name] for name in group.weights if name in self._alone and name not in self._weights.directions]
            if group.kind != "parameter" and own:
                exact.append(self._weights.square_norms(group, [contribution.written_out() for contribution in own]))  # type: ignore[attr-defined]
            elif own and isinstance(own[0], Rows):
                exact.append(own[0].square_norms()[0])
        rounded = self._rounded(self._contributions.__getitem__)
        total = _sum([*exact, *(square for square, _ in rounded)])
        if not rounded:
            return total.sqrt()
        error = _sum([error for _, error in rounded])
        # Not "larger than": a bound that overflowed to NaN vouches for nothing.
        doubted = ~(error <= 2 * _MOST_RAISED * total)
        if not assume(~doubted.any()):
            for few in doubted.nonzero()[:, 0].split(_AT_ONCE):
                again = self._rounded(lambda name, few=few: self._contributions[name].in_float64(few))  # type: ignore[misc]
                total[few] = _sum([*(square[few].double() for square in exact), *(square for square, _ in again)]).to(total.dtype)
                error[few] = _sum([error for _, error in again]).to(error.dtype)
        # No norm is said to be shorter than it is by more than the tolerance.
        return (total + (error - 2 * _TOLERANCE * total).clamp(min=0)).sqrt()

    def _rounded(self, contribution: Callable[[str], Contribution]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Squares of norms that are differences of large numbers, and bounds on their rounding errors, all (n,)."""
        weights, rounded = self._weights, []
        for groups, closed in weights.closed:
            names = [group.weights[0] for group in groups]
            moments = [contribution(name).moments(weights.directions[name], weights.values[name]) for name in names]  # type: ignore[attr-defined]
            rounded.append(closed.square_norms(moments))
        for group in weights.traced.groups:
            name = group.weights[0]
            if group.kind == "parameter" and not isinstance(self._contributions[name], Rows):
                rounded.append(contribution(name).square_norms())
        return rounded

    def clipped_sums(self, coefficients: torch.Tensor, counts: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """Each parameter's sum of coefficient_i times gradient_i over those that count (None: all do). Lets go of all contributions."""
        values, contributions = self._weights.values, self._contributions
        # One after another they make room: per-example gradients take more memory than anything else.
        of_weights = {name: contributions.pop(name).weighted_sum(coefficients, counts) for name in [*contributions] if name in self._alone}
        for names, sizes, rows in self._small:
            for name, part in zip(names, rows.weighted_sum(coefficients, counts).split(sizes), strict=True):
                of_weights[name] = part.view(values[name].shape)
        return self._weights.pull_back(of_weights)


def _sum(parts: list[torch.Tensor]) -> torch.Tensor:
    """The sum of (m,) tensors."""
    return torch.stack(parts).sum(0)
