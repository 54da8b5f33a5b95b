"""The values of the weights at the present parameters, and the way back from their gradients to
those of the parameters.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from sfumato.clipping.graph.compile import guard
from sfumato.clipping.graph.parametrization import Group, Standardized, general_square_norms, pull_back, standardized
from sfumato.clipping.graph.sites import Traced
from sfumato.torch_internals import tree_flatten, tree_unflatten


@dataclasses.dataclass(frozen=True)
class Weights:
    """The values of the weights for some values of the parameters, and what leads back to these.

    Attributes:
        shared: What the images meet, or the model returns, of the graph's values that no image
            touches.
        parameters: The trainable ones, from which autograd has a record to `shared`.
        closed: Groups of one standardised weight each, and the closed form that holds for them.
    """

    traced: Traced
    shared: dict[Node, Any]
    parameters: dict[str, torch.Tensor]
    closed: list[tuple[list[Group], Standardized]]

    @functools.cached_property
    def values(self) -> dict[str, torch.Tensor]:
        """Each weight's."""
        return {name: self.shared[node] for name, node in self.traced.capture.weights.items()}

    @functools.cached_property
    def directions(self) -> dict[str, torch.Tensor]:
        """A weight's name, where a closed form holds -> its direction (`Standardized.along`)."""
        return {
            group.weights[0]: along
            for groups, form in self.closed
            for group, along in zip(groups, form.along, strict=True)
        }

    @property
    def need_record(self) -> bool:
        """Whether the way back is autograd's, at least for some."""
        directions = self.directions
        return any(group.kind != "parameter" and group.weights[0] not in directions for group in self.traced.groups)

    def apart(self) -> tuple[list[torch.Tensor], Callable[[Sequence[torch.Tensor]], "Weights"]]:
        """All tensors, and what makes such weights of such tensors, without a record."""
        leaves, structure = tree_flatten((self.shared, [form for _, form in self.closed]))
        are_tensors = [isinstance(leaf, torch.Tensor) for leaf in leaves]
        others = [None if is_tensor else leaf for is_tensor, leaf in zip(are_tensors, leaves, strict=True)]
        groups, rest = [groups for groups, _ in self.closed], dataclasses.replace(self, shared={}, closed=[])

        def together(tensors: Sequence[torch.Tensor]) -> "Weights":
            own = iter(tensors)
            shared, forms = tree_unflatten(
                [next(own) if is_tensor else other for is_tensor, other in zip(are_tensors, others, strict=True)],
                structure,
            )
            return dataclasses.replace(rest, shared=shared, closed=list(zip(groups, forms, strict=True)))

        return [leaf.detach() for leaf in leaves if isinstance(leaf, torch.Tensor)], together

    def pull_back(self, gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """From one gradient for each weight to one for each of the parameters."""
        pulled: dict[str, torch.Tensor] = {}
        for groups, form in self.closed:
            for group, parts in zip(
                groups, form.pull_back([gradients[group.weights[0]] for group in groups]), strict=True
            ):
                pulled |= {
                    name: part.view(self.parameters[name].shape)
                    for name, part in zip(group.parameters, parts, strict=True)
                }
        for group in self.traced.groups:
            own = [gradients[name] for name in group.weights]
            if group.kind == "parameter":
                pulled[group.parameters[0]] = own[0]
            elif group.parameters[0] not in pulled:
                pulled |= zip(
                    group.parameters, pull_back(self._weights_of(group), self._parameters_of(group), own), strict=True
                )
        return pulled

    def square_norms(self, group: Group, rows: list[torch.Tensor]) -> torch.Tensor:
        """(m,) squares of the norms of the parameters' gradients, from those of the weights written
        out, each pulled back.
        """
        return general_square_norms(self._weights_of(group), self._parameters_of(group), rows)

    def _weights_of(self, group: Group) -> list[torch.Tensor]:
        return [self.shared[self.traced.capture.weights[name]] for name in group.weights]

    def _parameters_of(self, group: Group) -> list[torch.Tensor]:
        return [self.parameters[name] for name in group.parameters]

    def _standardized(self, groups: list[Group]) -> tuple[Standardized, torch.Tensor]:
        return standardized(
            [weight for group in groups for weight in self._weights_of(group)],
            [self._parameters_of(group) for group in groups],
        )


def evaluate_weights(traced: Traced, state: dict[Node, Any]) -> Weights:
    """Computes the weights.

    Args:
        state: What the graph is given besides the images, from `Capture.state`.
    """
    capture = traced.capture
    with torch.enable_grad():
        shared, parameters = dict(state), {}
        for name, node in capture.parameters.items():
            shared[node] = parameters[name] = state[node].detach().requires_grad_()
        capture.shared.run(shared)
    weights = Weights(traced, {node: shared[node] for node in capture.used if node in shared}, parameters, [])
    by_dtype: dict[torch.dtype, list[Group]] = {}
    for group in traced.groups:
        if group.kind == "standardized":
            by_dtype.setdefault(weights.values[group.weights[0]].dtype, []).append(group)
    closed = []
    for groups in by_dtype.values():
        form, holds = weights._standardized(groups)
        if not guard(holds.all()):
            groups = [group for group, one_holds in zip(groups, holds.tolist(), strict=True) if one_holds]
            if not groups:
                continue
            form, _ = weights._standardized(groups)
        closed.append((groups, form))
    return dataclasses.replace(weights, closed=closed)
