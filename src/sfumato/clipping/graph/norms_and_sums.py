"""What all sites together make: each example's norm, and the clipped sum for each parameter."""

from typing import Any

import torch

from sfumato.clipping.clip import at_least_float32
from sfumato.clipping.graph.rules import MaterializedGrads, PerExampleGrads
from sfumato.clipping.graph.weights import Weights

# What roundings, all going one way, could have taken from a norm is added to it, as far as it is
# more than this share.
_TOLERANCE = 1e-4
# Written-out gradients of no more values than this lie side by side: one norm and one product for
# all of them.
_FEW = 4096


class NormsAndSums:
    """Per-example gradients with respect to all parameters.

    Args:
        per_example_grads: To each weight's gradients.
    """

    def __init__(self, weights: Weights, per_example_grads: dict[str, PerExampleGrads]) -> None:
        self._weights, self._contributions = weights, per_example_grads
        small: dict[torch.dtype, dict[str, torch.Tensor]] = {}
        for group in weights.traced.groups:
            per_example = per_example_grads[group.weights[0]]
            if (
                group.kind == "parameter"
                and isinstance(per_example, MaterializedGrads)
                and per_example.shape.numel() <= _FEW
            ):
                rows = per_example.written_out()
                rows = rows.reshape(len(rows), -1)
                small.setdefault(rows.dtype, {})[group.weights[0]] = rows
        # Weights' names, numbers of values, and their gradients side by side.
        self._small = []
        self._alone = {*per_example_grads}
        for parts in small.values():
            together = MaterializedGrads(torch.cat(list(parts.values()), 1))
            self._small.append((list(parts), [part.shape[1] for part in parts.values()], together))
            self._alone.difference_update(parts)

    def norms(self) -> torch.Tensor:
        """(m,) L2 norms, each as long as roundings could have hidden, but for the tolerance."""
        weights, per_example_grads = self._weights, self._contributions
        squares = [rows.square_norms()[0] for _, _, rows in self._small]
        errors = []
        for groups, closed in weights.closed:
            names = [group.weights[0] for group in groups]
            moments = []
            for name in names:
                own: Any = per_example_grads[name]
                moments.append(own.moments(weights.directions[name], weights.values[name]))
            square, error = closed.square_norms(moments)
            squares.append(square)
            errors.append(error)
        for group in weights.traced.groups:
            name = group.weights[0]
            if name not in self._alone or name in weights.directions:
                continue
            if group.kind == "parameter":
                square, error = per_example_grads[name].square_norms()
                squares.append(square)
                errors.append(error)
            else:
                of_group: list[Any] = [per_example_grads[name] for name in group.weights]
                squares.append(weights.square_norms(group, [own.written_out() for own in of_group]))
        total = torch.stack(squares).sum(0)
        if errors:
            total = total + (torch.stack(errors).sum(0) - 2 * _TOLERANCE * total).clamp(min=0)
        return total.sqrt()

    def clipped_sums(self, coefficients: torch.Tensor, counts: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """Each parameter's sum of coefficient_i times gradient_i over those that count (None: all
        do). Lets go of all per_example_grads.
        """
        values, per_example_grads = self._weights.values, self._contributions
        # One after another they make room: per-example gradients take more memory than anything
        # else.
        of_weights = {}
        for name in [*per_example_grads]:
            if name in self._alone:
                of_weights[name] = per_example_grads.pop(name).weighted_sum(coefficients, counts)
        for names, sizes, rows in self._small:
            for name, part in zip(names, rows.weighted_sum(coefficients, counts).split(sizes), strict=True):
                of_weights[name] = part.view(values[name].shape)
        return self._weights.pull_back(of_weights)


def unshared(sums: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same in float32 at least, none sharing memory with another or with itself.

    Autograd gives one tensor to both parameters of a + b, and one number to all values of a sum:
    noise that is added to one in place would be added to the others, or fail.
    """
    apart: list[torch.Tensor] = []
    seen: set[int] = set()
    for total in map(at_least_float32, sums):
        is_shared = 0 in total.stride() or total.data_ptr() in seen
        apart.append(total.clone(memory_format=torch.contiguous_format) if is_shared else total)
        seen.add(apart[-1].data_ptr())
    return apart
