"""Clipped sums of many models in closed form are those of `clipped_sum`, each model and example by itself; columns and
pooling of small maps are PyTorch's own, bit for bit, and so are their gradients.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sfumato.clipping.func import clipped_sum
from sfumato.clipping.stacked import Stacked, columns_of, max_pool
from sfumato.models.small import LeNet, TanhCNN
from tests.clipping.problems import cross_entropy

NETWORKS = {"LeNet": (LeNet, 12), "TanhCNN": (TanhCNN, 17)}


def problem(name, dtype=torch.float64, models=3, examples=5):
    """A network, parameters of several models, images (M, B, 1, s, s), labels and which are real."""
    kind, side = NETWORKS[name]
    torch.manual_seed(0)
    model = kind(10, image_size=side)
    parameters = {
        name: (value.detach() + 0.1 * torch.randn(models, *value.shape)).to(dtype)
        for name, value in model.named_parameters()
    }
    images = torch.randn(models, examples, 1, side, side, dtype=dtype)
    return model, parameters, images, torch.randint(10, (models, examples)), torch.rand(models, examples) > 0.3


def sums(model, parameters, images, labels, is_real, clipping_norm):
    return Stacked(model).clipped_sum(parameters, images, labels, is_real, clipping_norm=clipping_norm)


@pytest.mark.parametrize(("name", "clipping_norm"), [("LeNet", 0.1), ("LeNet", 100.0), ("TanhCNN", 2.0)])
def test_each_model_has_the_sum_that_it_has_alone(name, clipping_norm):
    model, parameters, images, labels, is_real = problem(name)
    found = sums(model, parameters, images, labels, is_real, clipping_norm)
    assert list(found) == list(parameters)
    for number in range(3):
        true = clipped_sum(
            {key: value[number] for key, value in parameters.items()},
            model,
            cross_entropy,
            images[number, :, None],
            (labels[number],),
            is_real[number],
            clipping_norm=clipping_norm,
        )
        for key, value in true.items():
            torch.testing.assert_close(found[key][number], value, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", NETWORKS)
def test_what_is_not_finite_or_not_real_adds_exactly_zero(name):
    model, parameters, images, labels, is_real = problem(name, torch.float32)
    is_real[:] = True
    images[0, 1], images[1, 2, 0, 0, 0] = torch.nan, torch.inf
    found = sums(model, parameters, images, labels, is_real, 1.0)
    is_real[0, 1] = is_real[1, 2] = False
    images[0, 1] = images[1, 2] = 0.0
    without = sums(model, parameters, images, labels, is_real, 1.0)
    for key, value in without.items():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6)


def test_one_example_moves_the_sum_by_its_clipped_gradient_at_most():
    model, parameters, images, labels, is_real = problem("LeNet", examples=1)
    is_real[:] = True
    found = sums(model, parameters, 100 * images, labels, is_real, 0.1)
    lengths = sum(value.flatten(1).square().sum(1) for value in found.values()).sqrt()
    torch.testing.assert_close(lengths, torch.ones(3, dtype=torch.float64), rtol=1e-10, atol=0)


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


@pytest.mark.parametrize(
    ("layer", "shape", "levels"),
    [
        (nn.MaxPool2d(2), (3, 2, 8, 8), None),
        (nn.MaxPool2d(2), (3, 2, 7, 5), 1),
        (nn.MaxPool2d(2), (2, 1, 2, 3), 1),
        (nn.MaxPool2d(2, stride=1), (3, 2, 7, 5), 1),
        (nn.MaxPool2d(2, padding=1), (3, 2, 7, 5), 1),
        (nn.MaxPool2d(2, ceil_mode=True), (3, 2, 7, 5), 1),
    ],
    ids=str,
)
def test_pooling_is_the_layers_and_the_first_of_equal_values_has_the_gradient(layer, shape, levels):
    images = maps(*shape, levels=levels)
    found, true = with_gradient(lambda x: max_pool(layer, x), images), with_gradient(layer, images)
    assert torch.equal(found[0], true[0])
    assert torch.equal(found[1], true[1])
