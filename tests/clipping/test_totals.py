"""Norms over all parameters: where roundings could shorten one, it is raised or taken again in float64."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sfumato.clipping import clipped_grad, totals
from sfumato.clipping.rules import GHOSTS, convolution, linear
from sfumato.nn import WeightStandardizedConv2d

METHODS = {"memory_format": "contiguous", "0:conv2d.weight": "conv_ghost", "2:conv2d_1.weight": "conv_ghost", "6:linear.weight": "ghost"}


def loss_fn(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="none")


@pytest.fixture
def problem():
    torch.manual_seed(0)
    convolutions = WeightStandardizedConv2d(3, 6, 3), nn.Tanh(), nn.Conv2d(6, 4, 3), nn.GroupNorm(2, 4), nn.Tanh()
    model = nn.Sequential(*convolutions, nn.Flatten(2), nn.Linear(16, 5), nn.Flatten(1), nn.Linear(20, 3))
    return model, torch.randn(5, 3, 8, 8), torch.randint(3, (5,))


@pytest.mark.parametrize("views", [0, 2])
def test_norms_in_doubt_are_taken_again_in_float64(problem, views, monkeypatch):
    model, inputs, targets = problem
    if views:
        inputs = torch.stack([inputs, inputs.flip(3)], 1)
    grad_fn = clipped_grad(model, loss_fn, clipping_norm=0.1, augmult=views, microbatch_size=5, engine="graph", methods=METHODS)
    sure = grad_fn(inputs, targets)
    assert METHODS.items() <= grad_fn.methods.items()
    again = []
    for ghost in (convolution.Ghost, linear.Ghost):
        spied = ghost.in_float64
        monkeypatch.setattr(ghost, "in_float64", lambda self, examples, spied=spied: again.append(len(examples)) or spied(self, examples))
    grad_fn(inputs, targets)
    assert not again
    monkeypatch.setattr(totals, "_MOST_RAISED", 1e-7)  # everything is in doubt
    doubted = grad_fn(inputs, targets)
    ghosts = sum(method in GHOSTS for method in grad_fn.methods.values())
    assert again == [4] * ghosts + [1] * ghosts
    reference = clipped_grad(model, loss_fn, clipping_norm=0.1, augmult=views, engine="reference")(inputs, targets)
    for out in (sure, doubted):
        torch.testing.assert_close(out.grad_norms, reference.grad_norms, rtol=1e-5, atol=0.0)
        for name, value in reference.grad_sum.items():
            torch.testing.assert_close(out.grad_sum[name], value, rtol=1e-4, atol=1e-5)


def test_a_norm_is_raised_by_what_roundings_could_add_to_it(problem, monkeypatch):
    """Up to one part in 10,000 is forgiven, and the norm grows with the bound from there on."""
    model, inputs, targets = problem
    grad_fn = clipped_grad(model, loss_fn, clipping_norm=0.1, microbatch_size=5, engine="graph", methods=METHODS)
    true, share = grad_fn(inputs, targets).grad_norms, [0.0]
    rounded = totals.Totals._rounded

    def less_certain(self, contribution):
        (square, error), *rest = rounded(self, contribution)
        return [(square, error + share[0] * true.square()), *rest]

    monkeypatch.setattr(totals.Totals, "_rounded", less_certain)
    for share[0], raised in ((1e-4, 0.0), (1e-3, 8e-4), (1.9e-3, 1.7e-3)):
        expected = true * (1 + raised) ** 0.5
        torch.testing.assert_close(grad_fn(inputs, targets).grad_norms, expected, rtol=3e-5, atol=0.0)


@pytest.mark.parametrize("bound", [float("nan"), float("inf")])
def test_a_bound_that_overflowed_vouches_for_no_norm(problem, bound, monkeypatch):
    model, inputs, targets = problem
    grad_fn = clipped_grad(model, loss_fn, clipping_norm=0.1, engine="graph", methods=METHODS)
    true = grad_fn(inputs, targets)
    ghost = convolution.Ghost._channel_squares

    def overflowed(self, grads):
        squares, largest = ghost(self, grads)
        return (0.5 * squares, torch.full_like(largest, bound)) if grads.dtype == torch.float32 else (squares, largest)

    monkeypatch.setattr(convolution.Ghost, "_channel_squares", overflowed)
    torch.testing.assert_close(grad_fn(inputs, targets).grad_norms, true.grad_norms, rtol=1e-5, atol=0.0)
