"""The residual networks that De et al. (2022) trained privately: one for small images, one for large ones.

Wide-ResNet, with group normalisation. Parameters with the defaults, 3 channels and 10 classes: WRN-16-4 2,753,818;
WRN-40-4 8,961,306; WRN-28-10 36,500,378. Sander et al.'s WRN-16-4, without weight standardisation: 2,751,562.

NF-ResNet, without normalisation, after Brock et al. (2021), *Characterizing signal propagation to close the
performance gap in unnormalized ResNets*. NF-ResNet-50 with 1,000 classes has 25,557,048 parameters.
"""

import functools
import math
from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F

from sfumato.errors import InputError
from sfumato.models.layers import Order, WeightStandardizedConv2d, in_order, init_conv, init_linear

BLOCKS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3), 200: (3, 24, 36, 3)}
"""Blocks of the four stages of `NfResNet`, by depth."""

_CHANNELS = (256, 512, 1024, 2048)
_ALPHA = 0.2  # what each block adds, as a share of its input's deviation
_GAIN = 1.7139588594436646
"""Of a standard Gaussian after ReLU, the variance is 1 again (Brock et al. 2021, measured)."""


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
        normalization: Literal["group", "none"] = "group",
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


class NfResNet(nn.Module):
    """NF-ResNet: weights are standardised, activations scaled, nothing is normalised.

    A block adds alpha times its residual branch to its input, and sees that input divided by the
    deviation which follows: sqrt(1 + alpha^2), sqrt(1 + 2 alpha^2) and so on, anew in each stage.
    There is no stochastic depth, as the paper has it (its released configuration left 0.1 on).

    Args:
        depth: A key of `BLOCKS`.
        num_classes: Outputs.
        channels: Of the input.
        skip_init: What the residual branches are multiplied by at first, a trained number a block:
            1 from scratch (De et al. 2022, C.1), 0 in Brock et al.

    Shape:
        (rows, channels, H, W) -> (rows, num_classes), H and W at least 32
    """

    def __init__(self, depth: int, num_classes: int, channels: int = 3, skip_init: float = 1.0) -> None:
        super().__init__()
        self.stem = WeightStandardizedConv2d(channels, 64, 7, 2, padding=3)
        blocks: list[nn.Module] = []
        previous, variance = 64, 1.0
        for stage, (width, count) in enumerate(zip(_CHANNELS, BLOCKS[depth], strict=True)):
            for index in range(count):
                stride = 2 if index == 0 and stage else 1
                blocks.append(Bottleneck(previous, width, stride, 1 / math.sqrt(variance), skip_init))
                variance = (1.0 if index == 0 else variance) + _ALPHA**2
                previous = width
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(previous, num_classes)
        nn.init.normal_(self.classifier.weight, std=0.01)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(self.stem(x), 3, 2, padding=1)
        x = _activate(self.blocks(x))  # (rows, 2048, H / 32, W / 32)
        return self.classifier(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Bottleneck(nn.Module):
    """A bottleneck of a quarter of the channels, and a 1x1 shortcut where the shape changes."""

    def __init__(self, fan_in: int, fan_out: int, stride: int, beta: float, skip_init: float) -> None:
        super().__init__()
        width = fan_out // 4
        self.beta = beta
        self.reduce = WeightStandardizedConv2d(fan_in, width, 1)
        self.middle = WeightStandardizedConv2d(width, width, 3, stride, padding=1)
        self.expand = WeightStandardizedConv2d(width, fan_out, 1)
        changes = stride > 1 or fan_in != fan_out
        self.shortcut = WeightStandardizedConv2d(fan_in, fan_out, 1, stride) if changes else None
        self.skip_gain = nn.Parameter(torch.full((1,), skip_init))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        active = _activate(x) * self.beta
        shortcut = x if self.shortcut is None else self.shortcut(active)
        residual = self.expand(_activate(self.middle(_activate(self.reduce(active)))))
        return shortcut + residual * (_ALPHA * self.skip_gain)


def _activate(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x) * _GAIN


NETWORKS = {f"nf_resnet{depth}": functools.partial(NfResNet, depth) for depth in BLOCKS}
"""By the names that recipes use."""
