"""Columns and pooling of small maps are PyTorch's own, bit for bit, and so are their gradients."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sfumato.clipping.stacked import columns_of, max_pool


def maps(*shape, levels=None):
    """Random maps; with few levels most windows have several largest values."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
    return (values * levels).round() / levels if levels else values


def with_gradient(function, images):
    images = images.clone().requires_grad_()
    values = function(images)
    weights = torch.randn(values.shape, generator=torch.Generator().manual_seed(2))
    return values.detach(), torch.autograd.grad(values, images, weights)[0]


@pytest.mark.parametrize(
    ("kernel", "padding", "stride"), [(1, 0, 1), (3, 2, 2), (3, 0, 1), ((2, 5), (1, 0), (2, 3)), (3, 2, (2, 3))]
)
def test_columns_are_unfolds(kernel, padding, stride):
    layer = nn.Conv2d(3, 2, kernel, padding=padding, stride=stride)
    images = maps(4, 3, 9, 10)
    found = with_gradient(lambda x: columns_of(layer, x), images)
    true = with_gradient(lambda x: F.unfold(x, layer.kernel_size, padding=layer.padding, stride=layer.stride), images)
    assert torch.equal(found[0], true[0])
    assert torch.equal(found[1], true[1])


@pytest.mark.parametrize("levels", [None, 1])
@pytest.mark.parametrize("shape", [(3, 2, 8, 8), (3, 2, 7, 5), (2, 1, 2, 3)])
@pytest.mark.parametrize(
    "layer",
    [
        nn.MaxPool2d(2),
        nn.MaxPool2d((2, 2), stride=(2, 2)),
        nn.MaxPool2d(2, stride=1),
        nn.MaxPool2d(2, padding=1),
        nn.MaxPool2d(2, ceil_mode=True),
    ],
    ids=str,
)
def test_pooling_is_the_layers_and_the_first_of_equal_values_has_the_gradient(layer, shape, levels):
    images = maps(*shape, levels=levels)
    found, true = with_gradient(lambda x: max_pool(layer, x), images), with_gradient(layer, images)
    assert torch.equal(found[0], true[0])
    assert torch.equal(found[1], true[1])
