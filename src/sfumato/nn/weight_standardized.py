"""Convolution with weight standardisation."""

import torch
from torch import nn

from sfumato.nn.initialisation import init_conv

# Below this value of var * fan_in a kernel is not scaled up further: a constant one stays finite.
_MIN_SCALE = 1e-4


class WeightStandardizedConv2d(nn.Conv2d):
    r"""A convolution whose kernels have mean zero and unit norm, up to a trainable gain.

    For output channel i, with mean and population variance over its fan-in,

    .. math:: \hat W_i = \gamma_i \,(W_i - \mu_i) \,/ \sqrt{\max(\sigma_i^2 \cdot \text{fan-in},\
    10^{-4})}

    (De et al. 2022, C.1, after Qiao et al. 2019 and Brock et al. 2021). The gain, starting
    at 1, and the bias, starting at 0, are those of the paper's released code; its formula
    omits them. Standardisation is part of the forward pass, and differentiated through.

    Args:
        As for `torch.nn.Conv2d`.

    Shape:
        (rows, in_channels, H, W) -> (rows, out_channels, H', W'); `gain` is (out_channels, 1, 1,
        1).
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.gain = nn.Parameter(torch.ones(self.out_channels, 1, 1, 1))
        init_conv(self)

    def standardized_weight(self) -> torch.Tensor:
        rows = self.weight.flatten(1)  # several times faster than reductions over three dimensions
        centred = rows - rows.mean(1, keepdim=True)
        square_length = torch.linalg.vecdot(centred, centred).unsqueeze(1)  # variance * fan-in
        scale = self.gain.flatten(1) * torch.rsqrt(torch.clamp(square_length, min=_MIN_SCALE))
        return (centred * scale).view_as(self.weight)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self._conv_forward(input, self.standardized_weight(), self.bias)
