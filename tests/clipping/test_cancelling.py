"""Images of one colour whose gradients cancel: a squared norm that is a small difference of large numbers, and every
rounding goes the same way.
"""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sfumato.clipping import clipped_grad
from sfumato.models.layers import WeightStandardizedConv2d
from tests.clipping.problems import norm

# How much of the gradients is left.
LEFT = [sign * 10.0**-power for power in torch.linspace(0.3, 4, 24).tolist() for sign in (1, -1)]


def loss_fn(outputs, targets):
    """The gradient of the outputs is `targets`."""
    return (outputs.flatten(1) * targets.flatten(1)).sum(1)


def images(shape, out_shape, levels=None):
    """Two halves of one grey level each, and gradients that cancel but for `LEFT`; one image for each.

    Args:
        levels: Of the channels, in place of ones.
    """
    generator = torch.Generator().manual_seed(1)
    bright, dark, size = (1 + torch.rand(3, len(LEFT), generator=generator)).unbind()
    inputs, gradients = torch.empty(len(LEFT), *shape), torch.empty(len(LEFT), *out_shape)
    spread = [1] * (len(shape) - 1)
    for tensor, one, other in (
        (inputs, bright, dark),
        (gradients, size, -size * bright / dark * (1 + torch.tensor(LEFT))),
    ):
        half = tensor.shape[-2] // 2
        tensor[..., :half, :], tensor[..., half:, :] = (
            one.view(-1, *[1] * (tensor.ndim - 1)),
            other.view(-1, *[1] * (tensor.ndim - 1)),
        )
    return inputs if levels is None else inputs * levels.view(-1, *spread), gradients


def tokens(features, outputs, positions=16):
    """The same for a linear layer."""
    inputs, gradients = images((1, positions, features), (1, positions, outputs))
    return inputs[:, 0], gradients[:, 0]


LEVELS = torch.linspace(0.5, 2.0, 512)
CASES = {
    "patch_ghost": (nn.Conv2d(3, 64, 16, stride=16, bias=False), *images((3, 64, 64), (64, 4, 4))),
    "conv_ghost": (nn.Conv2d(512, 32, 1, bias=False), *images((512, 8, 8), (32, 8, 8))),
    "ghost": (nn.Linear(768, 128, bias=False), *tokens(768, 128)),
    "ghost_at_once": (nn.Linear(192, 768, bias=False), *tokens(192, 768, positions=2)),
    # Standardised weights do not feel what all of a patch has in common, so that the gradient cancels on the way to the
    # parameters as well.
    "conv_ghost, standardized": (
        WeightStandardizedConv2d(512, 32, 1, bias=False),
        *images((512, 8, 8), (32, 8, 8), LEVELS),
    ),
    "grouped, standardized": (
        WeightStandardizedConv2d(512, 32, 1, bias=False),
        *images((512, 8, 8), (32, 8, 8), 1 + 0.1 * LEVELS),
    ),
}


def compare(model, key, method, inputs, targets):
    """No gradient is longer than it is said to be, nor is a clipped one that is alone, its sum's own rounding included.

    Returns:
        Norms as they are said, and true ones.
    """
    methods = {"memory_format": "contiguous", key: method}
    grad_fn = clipped_grad(
        model, loss_fn, clipping_norm=1e-3, microbatch_size=len(inputs), engine="graph", methods=methods
    )
    said = grad_fn(inputs, targets).grad_norms.double().nan_to_num(torch.inf)  # either counts for nothing
    assert methods.items() <= grad_fn.methods.items()
    true = clipped_grad(copy.deepcopy(model).double(), loss_fn, clipping_norm=1.0, engine="reference")(
        inputs.double(), targets.double()
    ).grad_norms
    assert (true <= said * (1 + 1.05e-4)).all()
    assert all(norm(grad_fn(inputs[[i]], targets[[i]]).grad_sum) <= 1 + 2e-4 for i in range(len(inputs)))
    return said, true


@pytest.mark.parametrize("case", CASES)
def test_no_gradient_is_longer_than_it_is_said_to_be(case):
    layer, inputs, targets = CASES[case]
    torch.manual_seed(0)
    layer.reset_parameters()
    key = f"0:{'linear' if isinstance(layer, nn.Linear) else 'conv2d'}.weight"
    said, true = compare(nn.Sequential(layer), key, case.partition(",")[0], inputs, targets)
    assert (said[:6] <= 1.05 * true[:6]).all()  # nor much shorter, where a fifth is left


TINY, HUGE = 2.5e-23, 2e17  # squares of the one are below the smallest number
UNDERFLOWS = {
    "ghost": (nn.Linear(512, 16, bias=False), "0:linear.weight", (8, 512), (8, 16)),
    "ghost_at_once": (nn.Linear(512, 16, bias=False), "0:linear.weight", (8, 512), (8, 16)),
    "ghost, one position": (nn.Linear(512, 16, bias=False), "0:linear.weight", (512,), (16,)),
    "patch_ghost": (nn.Conv2d(3, 16, 8, stride=8, bias=False), "0:conv2d.weight", (3, 32, 32), (16, 4, 4)),
    "conv_ghost": (nn.Conv2d(3, 8, 3, bias=False), "0:conv2d.weight", (3, 8, 8), (8, 6, 6)),
    "conv_ghost, standardized": (
        WeightStandardizedConv2d(3, 8, 3, bias=False),
        "0:conv2d.weight",
        (3, 8, 8),
        (8, 6, 6),
    ),
}


@pytest.mark.parametrize("case", UNDERFLOWS)
def test_values_whose_squares_vanish_do_not_hide_a_gradient(case):
    layer, key, shape, out_shape = UNDERFLOWS[case]
    pairs = torch.tensor([(TINY, HUGE), (HUGE, TINY), (1e-22, HUGE), (3e-22, HUGE), (1e-20, 1e16), (TINY, 1e30)])
    scales, sizes = (
        side.view(-1, *[1] * len(dims)) for side, dims in zip(pairs.unbind(1), (shape, out_shape), strict=True)
    )
    inputs, targets = (
        scales * (1 + torch.rand(len(pairs), *shape, generator=torch.Generator().manual_seed(0))),
        sizes.expand(-1, *out_shape),
    )
    assert (compare(nn.Sequential(layer), key, case.partition(",")[0], inputs, targets)[1] > 1e-4).any()


class Shifted(WeightStandardizedConv2d):
    """Its weight points a little beside the direction that standardisation takes out."""

    def __init__(self, shift):
        super().__init__(32, 4, 1, bias=False)
        self.register_buffer("shift", torch.tensor(shift))

    def forward(self, x):
        weight = self.standardized_weight()
        aside = weight.detach().roll(1, 1) - weight.detach().mean(1, keepdim=True)
        return F.conv2d(x, weight + self.shift * aside)


@pytest.mark.parametrize("method", ["conv_ghost", "loop"])
@pytest.mark.parametrize(("mean", "shift"), [(0.0, None), (100.0, None), (10_000.0, None), (0.0, 1e-3), (0.0, 4e-3)])
def test_what_standardisation_takes_out_is_known_exactly(mean, shift, method):
    """Patches along what it takes out, and a thousandth beside it: weights that are mostly mean, or that a constant is
    added to.
    """
    torch.manual_seed(0)
    layer = WeightStandardizedConv2d(32, 4, 1, bias=False) if shift is None else Shifted(shift)
    with torch.no_grad():
        layer.weight.copy_((torch.randn(1, 32, 1, 1) + mean).expand_as(layer.weight))
    layer.gain.requires_grad_(False)
    own = layer.weight.detach()[0].flatten().double()
    along, beside = own - own.mean(), torch.randn(32, dtype=torch.float64)
    along /= along.norm()
    beside -= beside.mean() + along * (along @ (beside - beside.mean()))
    beside /= beside.norm()
    flat = torch.full_like(along, 32**-0.5)
    patches = torch.stack(
        [
            one + sign * along + left * beside
            for one in (flat, 0 * flat)
            for sign in (1, -1)
            for left in (0.3, 0.1, 0.03, 0.01)
        ]
    )
    inputs = 1e4 * patches.float()[:, :, None, None].expand(-1, -1, 1, 2).contiguous()
    compare(nn.Sequential(layer), "0:conv2d.weight", method, inputs, torch.full((len(inputs), 4, 1, 2), 1e4))
