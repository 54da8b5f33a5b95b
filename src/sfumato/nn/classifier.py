"""A network's last layer alone."""

import torch
from torch import nn
from torch.nn import functional as F


class UnitLinear(nn.Linear):
    """A linear layer on features of length 1, so that one clipping norm suits every network: the
    gradient of an example is then hardly longer than its error.

    Its bias counts a tenth: the gradient by it is as long as the error, whatever the image shows, so that a whole one
    takes half of what clipping leaves of each gradient's square (docs/defaults.md has the evidence).
    """

    BIAS_SCALE = 0.1

    def scaled(self, features: torch.Tensor) -> torch.Tensor:
        """What the weight multiplies: (rows, D)."""
        return F.normalize(features)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return F.linear(self.scaled(features), self.weight, scaled_bias(self))


class CentredLinear(UnitLinear):
    """The same on what features of length 1 differ in from a centre, made as long again: what all images have in
    common no longer takes most of each length.

    Attributes:
        centre: (D,), a buffer; zeros until there is one.
    """

    centre: torch.Tensor

    def scaled(self, features: torch.Tensor) -> torch.Tensor:
        return centred(F.normalize(features), self.centre)


def centred(features: torch.Tensor, centre: torch.Tensor) -> torch.Tensor:
    """Features of length 1 less the centre, of length 1 again: (rows, D)."""
    return F.normalize(features - centre)


def bias_scale(layer: nn.Linear) -> float:
    """What a linear layer multiplies its bias by."""
    return UnitLinear.BIAS_SCALE if isinstance(layer, UnitLinear) else 1.0


def scaled_bias(layer: nn.Linear) -> torch.Tensor | None:
    """What a linear layer adds to each output."""
    return None if layer.bias is None else bias_scale(layer) * layer.bias


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
        return F.linear(features, self.layer.weight, scaled_bias(self.layer))
