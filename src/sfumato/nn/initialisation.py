"""Initial weights of variance 1/fan-in (De et al. 2022, C.1)."""

import math

from torch import nn

_STD_OF_CUT_GAUSSIAN = 0.87962566103423978
"""Standard deviation of N(0, 1) cut off at -2 and 2."""


def init_conv(conv: nn.Conv2d) -> nn.Conv2d:
    """Gaussian weights N(0, 1/fan_in), zero bias, in place."""
    fan_in = conv.weight[0].numel()
    nn.init.normal_(conv.weight, std=1 / math.sqrt(fan_in))
    if conv.bias is not None:
        nn.init.zeros_(conv.bias)
    return conv


def init_linear(linear: nn.Linear) -> nn.Linear:
    """Gaussian weights cut off at two standard deviations, of variance 1/fan_in after the cut, zero bias, in place.

    The classifier of the paper's released Wide-ResNet: haiku's VarianceScaling(1.0), whose Gaussian is wider by what
    the cut takes off. The paper speaks of a Gaussian alone.
    """
    std = 1 / math.sqrt(linear.in_features) / _STD_OF_CUT_GAUSSIAN
    nn.init.trunc_normal_(linear.weight, std=std, a=-2 * std, b=2 * std)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)
    return linear
