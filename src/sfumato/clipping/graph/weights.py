"""The values of the weights at the present parameters, the way back from their gradients to those of the parameters,
and what all sites together make: each example's norm, and the clipped sum for each parameter.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from sfumato.clipping.clip import at_least_float32, one_thread
from sfumato.clipping.graph.compile import guard
from sfumato.clipping.graph.export import Traced
from sfumato.clipping.graph.parametrization import Group, Standardized, general_square_norms, pull_back, standardized
from sfumato.clipping.graph.rules.site import Direction, MaterializedGrads, PerExampleGrads
from sfumato.torch_internals import tree_flatten, tree_unflatten

# What roundings, all going one way, could have taken from a norm is added to it, as far as it is
# more than this share.
_TOLERANCE = 1e-4
# Written-out gradients of no more values than this lie side by side: one norm and one product for
# all of them.
_FEW = 4096


@dataclasses.dataclass(frozen=True)
class Weights:
    """The values of the weights for some values of the parameters, and what leads back to these.

    Attributes:
        shared: What the images meet, or the model returns, of the graph's values that no image
            touches.
        parameters: The trainable ones, from which autograd has a record to `shared`.
        closed: Groups of one standardised weight each, all of one type.
        form: The closed form that holds for them; None: there are none.
    """

    traced: Traced
    shared: dict[Node, Any]
    parameters: dict[str, torch.Tensor]
    closed: list[Group]
    form: Standardized | None

    @functools.cached_property
    def values(self) -> dict[str, torch.Tensor]:
        """Each weight's."""
        return {name: self.shared[node] for name, node in self.traced.weights.items()}

    @functools.cached_property
    def directions(self) -> dict[str, Direction]:
        """A weight's name, where a closed form holds -> its direction (`Standardized.along`)."""
        found = {}
        for group, along in zip(self.closed, self.form.along if self.form else [], strict=True):
            found[group.weights[0]] = Direction(along, self.values[group.weights[0]])
        return found

    @property
    def need_record(self) -> bool:
        """Whether the way back is autograd's, at least for some."""
        directions = self.directions
        return any(group.kind != "parameter" and group.weights[0] not in directions for group in self.traced.groups)

    def apart(self) -> tuple[list[torch.Tensor], Callable[[Sequence[torch.Tensor]], "Weights"]]:
        """All tensors, and what makes such weights of such tensors, without a record."""
        leaves, structure = tree_flatten((self.shared, self.form))
        others = {i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)}
        rest = dataclasses.replace(self, shared={}, form=None)

        def together(tensors: Sequence[torch.Tensor]) -> "Weights":
            own, count = iter(tensors), len(tensors) + len(others)
            found = [others[i] if i in others else next(own) for i in range(count)]
            shared, form = tree_unflatten(found, structure)
            return dataclasses.replace(rest, shared=shared, form=form)

        return [leaf.detach() for leaf in leaves if isinstance(leaf, torch.Tensor)], together

    def pull_back(self, gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """From one gradient for each weight to one for each of the parameters."""
        pulled: dict[str, torch.Tensor] = {}
        if self.form is not None:
            of_closed = [gradients[group.weights[0]] for group in self.closed]
            with one_thread(max(gradient.numel() for gradient in of_closed)):
                of_groups = self.form.pull_back(of_closed)
            for group, parts in zip(self.closed, of_groups, strict=True):
                for name, part in zip(group.parameters, parts, strict=True):
                    pulled[name] = part.view(self.parameters[name].shape)
        for group in self.traced.groups:
            own = [gradients[name] for name in group.weights]
            if group.kind == "parameter":
                pulled[group.parameters[0]] = own[0]
            elif group.parameters[0] not in pulled:
                pulled |= zip(group.parameters, pull_back(*self.ends(group), own), strict=True)
        return pulled

    def ends(self, group: Group) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """A group's weights, and its parameters."""
        return [self.values[name] for name in group.weights], [self.parameters[name] for name in group.parameters]

    def standardized(self, groups: list[Group]) -> tuple[Standardized, torch.Tensor]:
        """The closed form of all these, and whether it holds for each."""
        ends = [self.ends(group) for group in groups]
        return standardized([weights[0] for weights, _ in ends], [parameters for _, parameters in ends])


def evaluate_weights(traced: Traced, state: dict[Node, Any]) -> Weights:
    """Computes the weights.

    Args:
        state: What the graph is given besides the images, from `Traced.state`.
    """
    with torch.enable_grad():
        shared, parameters = dict(state), {}
        for name, node in traced.parameters.items():
            shared[node] = parameters[name] = state[node].detach().requires_grad_()
        traced.compute_shared(shared)
    weights = Weights(traced, {node: shared[node] for node in traced.used if node in shared}, parameters, [], None)
    by_type: dict[torch.dtype, list[Group]] = {}
    for group in traced.groups:
        if group.kind == "standardized":
            by_type.setdefault(weights.values[group.weights[0]].dtype, []).append(group)
    groups = next(iter(by_type.values()), [])
    if not groups:
        return weights
    form, holds = weights.standardized(groups)
    if not guard(holds.all()):
        groups = [group for group, one_holds in zip(groups, holds.tolist(), strict=True) if one_holds]
        if not groups:
            return weights
        form, _ = weights.standardized(groups)
    return dataclasses.replace(weights, closed=groups, form=form)


class NormsAndSums:
    """Per-example gradients with respect to all parameters.

    Args:
        per_example_grads: To each weight's gradients.
    """

    def __init__(self, weights: Weights, per_example_grads: dict[str, PerExampleGrads]) -> None:
        self._weights, self._grads = weights, per_example_grads
        small: dict[torch.dtype, dict[str, torch.Tensor]] = {}
        for group in weights.traced.groups:
            own = per_example_grads[group.weights[0]]
            if group.kind == "parameter" and isinstance(own, MaterializedGrads) and own.shape.numel() <= _FEW:
                rows = own.written_out()
                small.setdefault(rows.dtype, {})[group.weights[0]] = rows.reshape(len(rows), -1)
        # Weights' names, numbers of values, and their gradients side by side.
        self._small = []
        self._alone = {*per_example_grads}
        for parts in small.values():
            self._alone.difference_update(parts)
            together = MaterializedGrads(torch.cat(list(parts.values()), 1))
            self._small.append((list(parts), [part.shape[1] for part in parts.values()], together))

    def norms(self) -> torch.Tensor:
        """(m,) L2 norms, each as long as roundings could have hidden, but for the tolerance."""
        weights, grads = self._weights, self._grads
        squares, errors = [], []
        for _, _, rows in self._small:
            squares.append(rows.square_norms()[0])
        if weights.form is not None:
            moments = []
            for name, direction in weights.directions.items():
                own: Any = grads[name]
                moments.append(own.moments(direction))
            with one_thread(sum(one.squares.numel() for one in moments)):
                square, error = weights.form.square_norms(moments)
            squares.append(square)
            errors.append(error)
        for group in weights.traced.groups:
            name = group.weights[0]
            if name not in self._alone or name in weights.directions:
                continue
            if group.kind == "parameter":
                square, error = grads[name].square_norms()
                squares.append(square)
                errors.append(error)
            else:
                of_group: list[Any] = [grads[name] for name in group.weights]
                squares.append(general_square_norms(*weights.ends(group), [own.written_out() for own in of_group]))
        total = torch.stack(squares).sum(0)
        if errors:
            total = total + (torch.stack(errors).sum(0) - 2 * _TOLERANCE * total).clamp(min=0)
        return total.sqrt()

    def clipped_sums(self, coefficients: torch.Tensor) -> dict[str, torch.Tensor]:
        """Each parameter's sum of coefficient_i times gradient_i. Lets go of all per_example_grads."""
        # One after another they make room: per-example gradients take more memory than anything
        # else.
        of_weights = {}
        for name in [*self._grads]:
            if name in self._alone:
                of_weights[name] = self._grads.pop(name).weighted_sum(coefficients)
        for names, sizes, rows in self._small:
            for name, part in zip(names, rows.weighted_sum(coefficients).split(sizes), strict=True):
                of_weights[name] = part.view(self._weights.values[name].shape)
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
