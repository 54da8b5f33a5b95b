"""The values of the weights at the present parameters, and the way back from their gradients to those of the parameters."""

from typing import Any

import torch
from torch.fx import Node

from sfumato.clipping.assumptions import assume
from sfumato.clipping.capture import execute
from sfumato.clipping.derived import Group, Standardized, general_square_norms, pull_back
from sfumato.clipping.norms import row_norms
from sfumato.clipping.tracing import Traced


class Weights:
    """The values of the weights for some values of the parameters, and what leads back to these.

    Attributes:
        shared: Every value of the graph that no image touches.
        values: Each weight's.
        closed: Groups of one standardised weight each, and the closed form that holds for them.
        directions: Such a weight's name -> its direction (`Standardized.along`).

    Args:
        state: What the graph is given besides the images, from `Capture.state`.
    """

    def __init__(self, traced: Traced, state: dict[Node, Any]) -> None:
        with torch.enable_grad():
            self._parameters = {name: state[node].detach().requires_grad_() for name, node in traced.capture.parameters.items()}
            self.shared = state | {node: self._parameters[name] for name, node in traced.capture.parameters.items()}
            execute(traced.capture.shared, self.shared)
        self.values = {name: self.shared[node] for name, node in traced.capture.weights.items()}
        self.closed: list[tuple[list[Group], Standardized]] = []
        by_dtype: dict[torch.dtype, list[Group]] = {}
        for group in traced.groups:
            if group.kind == "standardized":
                by_dtype.setdefault(self.values[group.weights[0]].dtype, []).append(group)
        for groups in by_dtype.values():
            closed = self._standardized(groups)
            if not assume(closed.holds.all()):
                groups = [group for group, holds in zip(groups, closed.holds.tolist(), strict=True) if holds]
                if not groups:
                    continue
                closed = self._standardized(groups)
            self.closed.append((groups, closed))
        self.directions = {group.weights[0]: along for groups, closed in self.closed for group, along in zip(groups, closed.along, strict=True)}

    def pull_back(self, groups: tuple[Group, ...], gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """From one gradient for each weight to one for each of the parameters."""
        pulled: dict[str, torch.Tensor] = {}
        for of_closed, closed in self.closed:
            for group, parts in zip(of_closed, closed.pull_back([gradients[group.weights[0]] for group in of_closed]), strict=True):
                pulled |= {name: part.view_as(self._parameters[name]) for name, part in zip(group.parameters, parts, strict=True)}
        for group in groups:
            own = [gradients[name] for name in group.weights]
            if group.kind == "parameter":
                pulled[group.parameters[0]] = own[0]
            elif group.weights[0] not in self.directions:
                pulled |= zip(group.parameters, pull_back(self._values(group), self._of(group), own), strict=True)
        return pulled

    def square_norms(self, group: Group, rows: list[torch.Tensor]) -> torch.Tensor:
        """(m,) squares of the norms of the parameters' gradients, from those of the weights written out."""
        if group.kind == "parameter":
            return row_norms(rows[0].reshape(len(rows[0]), -1)).square()
        return general_square_norms(self._values(group), self._of(group), rows)

    def _standardized(self, groups: list[Group]) -> Standardized:
        return Standardized([self.values[group.weights[0]] for group in groups], [self._of(group) for group in groups])

    def _values(self, group: Group) -> list[torch.Tensor]:
        return [self.values[name] for name in group.weights]

    def _of(self, group: Group) -> list[torch.Tensor]:
        return [self._parameters[name] for name in group.parameters]
