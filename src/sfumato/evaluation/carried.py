"""A network and a loss for images that carry their class and person behind them (`sfumato.data.people`)."""

import dataclasses

import torch
from torch import nn

from sfumato.evaluation.objective import Objective

NETWORK = "network."
"""Before the names of the network's parameters."""


class Carrying(nn.Module):
    """Hands an image to a network, and what stands behind it to the loss.

    Each row depends on itself alone, as in the network.

    Args:
        network: From (b, *shape) to (b, classes).
        shape: Of one image, or of its features.
        num_classes: Classes.
    """

    def __init__(self, network: nn.Module, shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.network = network
        self._first, self._behind = shape[0], num_classes + 2

    def forward(self, carried: torch.Tensor) -> torch.Tensor:
        """(b, 2 classes + 2): outputs, class, whether it counts, the person's number of images."""
        behind = carried[:, self._first :].flatten(1)[:, : self._behind]
        return torch.cat([self.network(carried[:, : self._first].contiguous()), behind], 1)


@dataclasses.dataclass(frozen=True)
class CarriedLoss:
    """The objective's loss of each row that counts, times K/n: the mean over K rows is that over the
    person's n images.
    """

    objective: Objective
    num_classes: int
    limit: int

    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """One loss per row: (rows, 2 classes + 2), and labels that are not looked at -> (rows,)."""
        logits, classes, is_own, count = outputs.split([self.num_classes, self.num_classes, 1, 1], dim=1)
        weight = is_own * (self.limit / count.clamp(min=1))
        return self.objective.loss(logits, classes) * weight[:, 0]
