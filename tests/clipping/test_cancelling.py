"""Images of one colour whose gradients cancel: a squared norm that is a small difference of large numbers, and every rounding goes the same way."""

import pytest
import torch
from torch import nn

from sfumato.clipping import clipped_grad
from sfumato.nn import WeightStandardizedConv2d

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
    for tensor, one, other in ((inputs, bright, dark), (gradients, size, -size * bright / dark * (1 + torch.tensor(LEFT)))):
        half = tensor.shape[-2] // 2
        tensor[..., :half, :], tensor[..., half:, :] = one.view(-1, *[1] * (tensor.ndim - 1)), other.view(-1, *[1] * (tensor.ndim - 1))
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
    # Standardised weights do not feel what all of a patch has in common, so that the gradient cancels on the way to the parameters as well.
    "conv_ghost, standardized": (WeightStandardizedConv2d(512, 32, 1, bias=False), *images((512, 8, 8), (32, 8, 8), LEVELS)),
    "grouped, standardized": (WeightStandardizedConv2d(512, 32, 1, bias=False), *images((512, 8, 8), (32, 8, 8), 1 + 0.1 * LEVELS)),
}


@pytest.mark.parametrize("case", CASES)
def test_no_gradient_is_longer_than_it_is_said_to_be(case):
    layer, inputs, targets = CASES[case]
    torch.manual_seed(0)
    layer.reset_parameters()
    model, method = nn.Sequential(layer), case.partition(",")[0]
    key = f"0:{'linear' if isinstance(layer, nn.Linear) else 'conv2d'}.weight"
    methods = {"memory_format": "contiguous", key: method}
    grad_fn = clipped_grad(model, loss_fn, clipping_norm=1.0, microbatch_size=len(LEFT), engine="graph", methods=methods)
    said = grad_fn(inputs, targets).grad_norms.double()
    assert methods.items() <= grad_fn.methods.items()
    exact = clipped_grad(nn.Sequential(layer).double(), loss_fn, clipping_norm=1.0, engine="reference")
    true = exact(inputs.double(), targets.double()).grad_norms
    layer.float()
    for i in range(0, len(LEFT) // 2, 3):
        alone = grad_fn(inputs[i : i + 1], targets[i : i + 1]).grad_sum["0.weight"]
        assert alone.double().norm() <= 1 + 1.05e-4
    assert (true <= said * (1 + 1.05e-4)).all()
    assert (said[:8] <= true[:8] * (1 + 1.1e-3)).all()  # nor much shorter, where little cancels
