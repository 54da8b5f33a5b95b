"""What all meetings together make: each example's norm, and the clipped sum for each parameter."""

import torch

from sfumato.clipping.assumptions import assume
from sfumato.clipping.derived import Group
from sfumato.clipping.rules import Contribution, Rows
from sfumato.clipping.weights import Weights

# A norm that roundings, all going one way, could move by more than this share is computed again from written-out gradients.
_TOLERANCE = 1e-4
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
            if group.kind == "parameter" and isinstance(contribution, Rows) and contribution.rows.shape[1:].numel() <= _FEW:
                rows = contribution.rows.reshape(len(contribution.rows), -1)
                small.setdefault(rows.dtype, {})[group.weights[0]] = rows
        # Weights' names, numbers of values, and their gradients side by side.
        self._small = [
            (list(parts), [part.shape[1] for part in parts.values()], Rows(torch.cat(list(parts.values()), 1))) for parts in small.values()
        ]
        self._alone = {*contributions} - {name for names, _, _ in self._small for name in names}

    def norms(self, everyone: torch.Tensor) -> torch.Tensor:
        """(m,) L2 norms; `everyone` is (m,), the examples' numbers."""
        weights, contributions = self._weights, self._contributions
        values, directions = weights.values, weights.directions
        exact = [rows.square_norms()[0] for _, _, rows in self._small]
        rounded, errors = [], []
        for groups, closed in weights.closed:
            moments = [
                contributions[name].moments(directions[name], values[name])  # type: ignore[attr-defined]
                for name in (group.weights[0] for group in groups)
            ]
            square, error = closed.square_norms(moments)
            rounded.append(square)
            errors.append(error)
        others = [group for group in weights.traced.groups if group.weights[0] in self._alone and group.weights[0] not in directions]
        for group in others:
            if group.kind == "parameter":
                square, error = contributions[group.weights[0]].square_norms()
                rounded.append(square)
                errors.append(error)
            else:
                exact.append(self._square_norms(group, everyone))
        total = _sum([*exact, *rounded])
        if errors:
            doubted = _sum(errors) > 2 * _TOLERANCE * total
            if not assume(~doubted.any()):
                doubtful = doubted.nonzero()[:, 0]
                again = [group for groups, _ in weights.closed for group in groups] + [group for group in others if group.kind == "parameter"]
                total[doubtful] = _sum([square[doubtful] for square in exact] + [self._square_norms(group, doubtful) for group in again])
        return total.sqrt()

    def clipped_sums(self, coefficients: torch.Tensor, counts: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """Each parameter's sum of coefficient_i times gradient_i over those that count (None: all do)."""
        values = self._weights.values
        of_weights = {name: self._contributions[name].weighted_sum(coefficients, counts) for name in self._contributions if name in self._alone}
        for names, sizes, rows in self._small:
            for name, part in zip(names, rows.weighted_sum(coefficients, counts).split(sizes), strict=True):
                of_weights[name] = part.view(values[name].shape)
        return self._weights.pull_back(of_weights)

    def _square_norms(self, group: Group, examples: torch.Tensor) -> torch.Tensor:
        return self._weights.square_norms(group, [self._contributions[name].rows_of(examples) for name in group.weights])


def _sum(parts: list[torch.Tensor]) -> torch.Tensor:
    """The sum of (m,) tensors."""
    return torch.stack(parts).sum(0)
