"""Layers that models and clipping rules share."""

from sfumato.nn.initialisation import init_conv, init_linear
from sfumato.nn.weight_standardized import WeightStandardizedConv2d

__all__ = ["WeightStandardizedConv2d", "init_conv", "init_linear"]
