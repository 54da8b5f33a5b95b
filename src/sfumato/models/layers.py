"""Layers that models and clipping rules share, and group normalisation in place of batch normalisation."""

import copy
import functools
import math
from collections.abc import Callable
from typing import Literal, TypeVar, get_args

import torch
from torch import nn
from torch.nn import functional as F

from sfumato.errors import InputError

Layer = TypeVar("Layer", bound=nn.Module)
Order = Literal["activation-norm", "norm-activation"]
"""Of activation and normalisation, which private training is sensitive to (Sander et al. 2022, Fig. 5)."""

_STD_OF_CUT_GAUSSIAN = 0.87962566103423978
"""Standard deviation of N(0, 1) cut off at -2 and 2."""
# Below this value of var * fan_in a kernel is not scaled up further: a constant one stays finite.
_MIN_SCALE = 1e-4

MAX_GROUPS = 16
"""Of a group norm that replaces a batch normalisation."""


def in_order(activation: nn.Module, norm: nn.Module, order: Order) -> list[nn.Module]:
    """Both layers as they run.

    Raises:
        InputError: If there is no such order.
    """
    if order not in get_args(Order):
        raise InputError(f'model option order = "{order}" is unknown. Known are {", ".join(get_args(Order))}.')
    return [activation, norm] if order == "activation-norm" else [norm, activation]


def init_conv(conv: nn.Conv2d) -> nn.Conv2d:
    """Gaussian weights N(0, 1/fan_in), zero bias, in place (De et al. 2022, C.1)."""
    nn.init.normal_(conv.weight, std=1 / math.sqrt(conv.weight[0].numel()))
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
    nn.init.zeros_(linear.bias)
    return linear


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


class UnitLinear(nn.Linear):
    """A linear layer on features of length 1, so that one clipping norm suits every network: the
    gradient of an example is then hardly longer than its error.

    Its bias counts a tenth: the gradient by it is as long as the error, whatever the image shows, so that a whole one
    takes half of what clipping leaves of each gradient's square (docs/defaults.md has the evidence).

    Attributes:
        centre: (in_features,), a buffer, zeros at first: what features of length 1 differ in from it is made as long
            again, so that what all images have in common no longer takes most of each length.
    """

    BIAS_SCALE = 0.1
    centre: torch.Tensor

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.register_buffer("centre", torch.zeros(self.in_features, device=self.weight.device))

    def scaled(self, features: torch.Tensor) -> torch.Tensor:
        """What the weight multiplies: (rows, D)."""
        return centred(F.normalize(features), self.centre)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return F.linear(self.scaled(features), self.weight, scaled_bias(self))


def centred(features: torch.Tensor, centre: torch.Tensor) -> torch.Tensor:
    """Features or maps of length 1 less the centre, of length 1 again: (rows, D)."""
    return F.normalize((features - centre).flatten(1))


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


def fix_groupnorm(model: nn.Module) -> nn.Module:
    """Replaces every batch normalisation of a model by group normalisation, in place.

    The affine weights and biases, eps, dtype, device and which of them are frozen are kept;
    running statistics are dropped. A subclass that also applies an activation or dropout
    (timm's BatchNormAct2d) becomes the group norm followed by those submodules. A layer used
    in two places stays one layer. The number of groups is the largest up to 16 that divides
    the channels (De et al. 2022 use 16) and leaves at least two to each, since a group of one
    value, as one channel of a 1x1 map is, would be normalised to a constant.

    Raises:
        InputError: If a subclass does more than its submodules say, or has no shape yet.

    Returns:
        The model; a new module only where the model itself is a batch normalisation.

    Example:
        >>> fixed = fix_groupnorm(nn.Sequential(nn.Conv2d(3, 24, 3), nn.BatchNorm2d(24)))
        >>> type(fixed[1]).__name__, fixed[1].num_groups
        ('GroupNorm', 12)
    """
    return replaced(model, nn.modules.batchnorm._BatchNorm, _as_group_norm)


def replaced(model: nn.Module, kind: type[Layer], make: Callable[[Layer], nn.Module]) -> nn.Module:
    """Puts others in the place of all layers of a kind, in place; a layer used in two places stays one layer.

    Returns:
        The model; a new module only where the model itself is such a layer.
    """
    made = functools.cache(make)

    def visit(module: nn.Module) -> nn.Module:
        if isinstance(module, kind):
            return made(module)
        for name, child in module._modules.items():  # not named_children, which skips a layer's second place
            if child is not None:
                module._modules[name] = visit(child)
        return module

    return visit(model)


def _as_group_norm(norm: nn.modules.batchnorm._BatchNorm) -> nn.Module:
    if any(nn.parameter.is_lazy(value) for value in (*norm.parameters(), *norm.buffers())):
        name = type(norm).__name__
        known = name.removeprefix("Lazy")
        raise InputError(f"{name} has no shape yet, so it cannot be replaced. Use {known} with its number of channels.")
    followers = [child for child in norm.children() if not isinstance(child, nn.Identity)]
    if not _only_follows(norm, followers):
        raise InputError(
            f"{type(norm).__name__} does more than normalise, which would be lost. Write it as a batch normalisation "
            "and what follows it, or set another network."
        )
    channels = norm.num_features
    limit = max(1, min(MAX_GROUPS, channels // 2))
    groups = max(count for count in range(1, limit + 1) if channels % count == 0)
    group_norm = nn.GroupNorm(groups, channels, eps=norm.eps, affine=norm.affine)
    group_norm.train(norm.training)
    if norm.affine:
        group_norm.weight, group_norm.bias = norm.weight, norm.bias
    return nn.Sequential(group_norm, *followers) if followers else group_norm


def _only_follows(norm: nn.modules.batchnorm._BatchNorm, followers: list[nn.Module]) -> bool:
    """Whether, in evaluation mode, a subclass is the normalisation and then its submodules."""
    own = (nn.modules.batchnorm._BatchNorm.forward, nn.SyncBatchNorm.forward)
    if type(norm).forward in own:
        return not followers
    trial = copy.deepcopy(norm).eval()
    dims = 0 if isinstance(norm, nn.BatchNorm1d) else 3 if isinstance(norm, nn.BatchNorm3d) else 2
    values = torch.randn(2, norm.num_features, *[4] * dims, generator=torch.Generator().manual_seed(0))
    values = 3 * values.to(next(norm.parameters(), next(norm.buffers(), values)))
    with torch.no_grad():
        expected = nn.modules.batchnorm._BatchNorm.forward(trial, values)
        for follower in trial.children():
            expected = follower(expected)
        return bool(torch.allclose(trial(values), expected, atol=1e-5))
