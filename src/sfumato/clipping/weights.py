"""The values of the weights at the present parameters, and the way back from their gradients to those of the parameters."""

from typing import Any

import torch
from torch.fx import Node

from sfumato.clipping.capture import execute
from sfumato.clipping.derived import Group, Standardized, general_square_norms, pull_back
from sfumato.clipping.norms import row_norms
from sfumato.clipping.tracing import Traced


class Weights:
    """The values of the weights for some values of the parameters, and what leads back to these.

    Args:
        state: What the graph is given besides the images, from `Capture.state`.
    """

    def __init__(self, traced: Traced, state: dict[Node, Any]) -> None:
        with torch.enable_grad():
            self._parameters = {name: state[node].detach().requires_grad_() for name, node in traced.capture.parameters.items()}
            self.shared = state | {node: self._parameters[name] for name, node in traced.capture.parameters.items()}
            execute(traced.capture.shared, self.shared)
        self.values = {name: self.shared[node] for name, node in traced.capture.weights.items()}
        self.standardized: dict[str, Standardized] = {}
        for group in traced.groups:
            if group.kind == "standardized":
                (name,) = group.weights
                self.standardized[name] = Standardized(self.values[name], self._of(group))

    def pull_back(self, group: Group, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """From one gradient for each weight of a group to one for each of its parameters."""
        if group.kind == "parameter":
            return gradients
        closed = self.standardized.get(group.weights[0])
        if closed is not None and closed.holds:
            return [part.view_as(of) for part, of in zip(closed.pull_back(gradients[0].flatten(1)), self._of(group), strict=True)]
        return pull_back([self.values[name] for name in group.weights], self._of(group), gradients)

    def square_norms(self, group: Group, rows: list[torch.Tensor]) -> torch.Tensor:
        """(m,) squares of the norms of the parameters' gradients, from those of the weights written out."""
        if group.kind == "parameter":
            return row_norms(rows[0].reshape(len(rows[0]), -1)).square()
        return general_square_norms([self.values[name] for name in group.weights], self._of(group), rows)

    def _of(self, group: Group) -> list[torch.Tensor]:
        return [self._parameters[name] for name in group.parameters]
