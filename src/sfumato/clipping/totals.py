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
        rounded: list[tuple[list[Group], torch.Tensor, torch.Tensor]] = []  # groups, squares of their norms, bounds on the errors
        for groups, closed in weights.closed:
            moments = [
                contributions[name].moments(directions[name], values[name])  # type: ignore[attr-defined]
                for name in (group.weights[0] for group in groups)
            ]
            rounded.append((groups, *closed.square_norms(moments)))
        for group in weights.traced.groups:
            name = group.weights[0]
            if name not in self._alone or name in directions:
                continue
            if group.kind == "parameter":
                rounded.append(([group], *contributions[name].square_norms()))
            else:
                exact.append(self._square_norms(group, everyone))
        total = _sum([*exact, *(square for _, square, _ in rounded)])
        if rounded:
            # Not "larger than": a bound that overflowed to NaN vouches for nothing.
            doubted = ~(_sum([error for _, _, error in rounded]) <= 2 * _TOLERANCE * total)
            if not assume(~doubted.any()):
                doubtful = doubted.nonzero()[:, 0]
                parts = [square[doubtful] for square in exact]
                for groups, square, error in rounded:
                    parts += [self._square_norms(group, doubtful) for group in groups] if error.any() else [square[doubtful]]
                total[doubtful] = _sum(parts)
        return total.sqrt()

    def clipped_sums(self, coefficients: torch.Tensor, counts: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """Each parameter's sum of coefficient_i times gradient_i over those that count (None: all do). Lets go of all contributions."""
        values, contributions = self._weights.values, self._contributions
        # One after another they make room: per-example gradients take more memory than anything else.
        of_weights = {name: contributions.pop(name).weighted_sum(coefficients, counts) for name in [*contributions] if name in self._alone}
        for names, sizes, rows in self._small:
            for name, part in zip(names, rows.weighted_sum(coefficients, counts).split(sizes), strict=True):
                of_weights[name] = part.view(values[name].shape)
        return self._weights.pull_back(of_weights)

    def _square_norms(self, group: Group, examples: torch.Tensor) -> torch.Tensor:
        return self._weights.square_norms(group, [self._contributions[name].rows_of(examples) for name in group.weights])


def _sum(parts: list[torch.Tensor]) -> torch.Tensor:
    """The sum of (m,) tensors."""
    return torch.stack(parts).sum(0)
