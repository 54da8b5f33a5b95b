"""Layers that models and clipping rules share."""

from sfumato.nn.classifier import CentredLinear, Classifier, UnitLinear, bias_scale, centred
from sfumato.nn.groupnorm_fix import fix_groupnorm
from sfumato.nn.initialisation import init_conv, init_linear
from sfumato.nn.order import Order, in_order
from sfumato.nn.weight_standardized import WeightStandardizedConv2d

__all__ = [
    "CentredLinear",
    "Classifier",
    "Order",
    "UnitLinear",
    "WeightStandardizedConv2d",
    "bias_scale",
    "centred",
    "fix_groupnorm",
    "in_order",
    "init_conv",
    "init_linear",
]
