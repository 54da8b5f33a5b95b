"""Wide-ResNet with group normalisation, as trained privately by De et al. (2022).

Parameters with the defaults, 3 channels and 10 classes: WRN-16-4 2,753,818; WRN-40-4
8,961,306; WRN-28-10 36,500,378. Sander et al.'s WRN-16-4, without weight standardisation:
2,751,562.
"""

from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F

from sfumato.errors import InputError
from sfumato.models.layers import Order, WeightStandardizedConv2d, in_order, init_conv, init_linear

Normalization = Literal["group", "none"]


class WideResNet(nn.Module):
    """WRN-depth-width for small images (Zagoruyko and Komodakis 2016; De et al. 2022, C.1).

    A 3x3 stem to 16 channels, then three groups of (depth - 4) / 6 residual blocks of
    16, 32 and 64 times `width` channels, strides 1, 2, 2. The first block of every group
    has its own 1x1 shortcut. Every convolution but the stem, and the global mean before
    the classifier, comes after ReLU and group norm.

    Args:
        num_classes: Outputs.
        channels: Of the input.
        depth: 6n + 4: 10, 16, 22, 28, 40 ...
        width: Factor of the channels.
        order: "activation-norm" is ReLU, then norm: 3-9 points better in private training
            (Sander et al. 2022, Fig. 5); "norm-activation" the usual order.
        normalization: "group", or "none" (De et al. 2022, Table 2, baseline).
        groups: Of each group norm.
        weight_standardization: Standardise every convolution's kernels.

    Shape:
        (rows, channels, H, W) -> (rows, num_classes), H and W at least 8
    """

    def __init__(
        self,
        num_classes: int,
        channels: int = 3,
        depth: int = 16,
        width: int = 4,
        order: Order = "activation-norm",
        normalization: Normalization = "group",
        groups: int = 16,
        weight_standardization: bool = True,
    ) -> None:
        super().__init__()
        if depth < 10 or (depth - 4) % 6:
            raise InputError(f"wide_resnet: depth {depth} is not possible: take 6n + 4, for example 16, 28 or 40.")
        if width < 1:
            raise InputError(f"wide_resnet: width must be at least 1, not {width}.")
        if normalization not in ("group", "none"):
            raise InputError(f'wide_resnet: normalization "{normalization}" is unknown. Known are group, none.')
        if groups < 1 or 16 % groups:
            raise InputError(f"wide_resnet: groups = {groups} does not divide 16 channels. Choose 1, 2, 4, 8 or 16.")

        def conv(fan_in: int, fan_out: int, kernel: int, stride: int = 1) -> nn.Conv2d:
            if weight_standardization:
                return WeightStandardizedConv2d(fan_in, fan_out, kernel, stride, padding=kernel // 2)
            return init_conv(nn.Conv2d(fan_in, fan_out, kernel, stride, padding=kernel // 2))

        def activate(num_channels: int) -> nn.Module:
            norm = nn.GroupNorm(groups, num_channels) if normalization == "group" else nn.Identity()
            return nn.Sequential(*in_order(nn.ReLU(), norm, order))

        self.stem = conv(channels, 16, 3)
        blocks: list[nn.Module] = []
        previous = 16
        for group, widened in enumerate((16 * width, 32 * width, 64 * width)):
            for index in range((depth - 4) // 6):
                first = index == 0
                stride = 2 if first and group else 1
                layers = activate(previous), conv(previous, widened, 3, stride), activate(widened)
                residual = nn.Sequential(*layers, conv(widened, widened, 3))
                shortcut: nn.Module = nn.Identity()
                if first:
                    shortcut = nn.Sequential(activate(previous), conv(previous, widened, 1, stride))
                blocks.append(Block(residual, shortcut))
                previous = widened
        self.blocks = nn.Sequential(*blocks)
        self.activate = activate(previous)
        self.classifier = init_linear(nn.Linear(previous, num_classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.activate(self.blocks(self.stem(x)))  # (rows, 64 * width, H / 4, W / 4)
        return self.classifier(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Block(nn.Module):
    """Two 3x3 convolutions, each after an activation, added to the input or to its 1x1 shortcut."""

    def __init__(self, residual: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.residual, self.shortcut = residual, shortcut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.residual(x) + self.shortcut(x)
