"""A network's last layer alone."""

import torch
from torch import nn
from torch.nn import functional as F


class Classifier(nn.Module):
    """The linear layer of a network that decides, under the names that its parameters have there:
    from features (rows, D) to outputs (rows, classes).

    Args:
        layer: Its weight and bias; it is shared, not copied.
        name: Of the layer in the network, such as "head.fc".
    """

    def __init__(self, layer: nn.Linear, name: str) -> None:
        super().__init__()
        inner: nn.Module = self
        *path, last = name.split(".")
        for part in path:
            nested = nn.Module()
            inner.add_module(part, nested)
            inner = nested
        inner.add_module(last, layer)
        self._name = name

    @property
    def layer(self) -> nn.Linear:
        """The layer itself; what it does besides multiplying is no part of this module."""
        layer = self.get_submodule(self._name)
        assert isinstance(layer, nn.Linear)
        return layer

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return F.linear(features, self.layer.weight, self.layer.bias)
