"""Norms over all parameters: where roundings could move one, it is taken of gradients that are written out."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sfumato.clipping import clipped_grad, totals
from sfumato.clipping.rules import convolution, linear
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
def test_norms_in_doubt_are_taken_of_all_gradients_written_out(problem, views, monkeypatch):
    model, inputs, targets = problem
    if views:
        inputs = torch.stack([inputs, inputs.flip(3)], 1)
    grad_fn = clipped_grad(model, loss_fn, clipping_norm=0.1, augmult=views, engine="graph", methods=METHODS)
    sure = grad_fn(inputs, targets)
    assert METHODS.items() <= grad_fn.methods.items()
    written_out = []
    for ghost in (convolution.Ghost, linear.Ghost):
        spied = ghost.rows_of
        monkeypatch.setattr(ghost, "rows_of", lambda self, examples, spied=spied: written_out.append(type(self)) or spied(self, examples))
    grad_fn(inputs, targets)
    assert not written_out
    monkeypatch.setattr(totals, "_TOLERANCE", 0.0)  # everything is in doubt
    doubted = grad_fn(inputs, targets)
    assert written_out.count(convolution.Ghost) == 2 and written_out.count(linear.Ghost) == 1
    reference = clipped_grad(model, loss_fn, clipping_norm=0.1, augmult=views, engine="reference")(inputs, targets)
    for out in (sure, doubted):
        torch.testing.assert_close(out.grad_norms, reference.grad_norms, rtol=1e-5, atol=0.0)
        for name, value in reference.grad_sum.items():
            torch.testing.assert_close(out.grad_sum[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bound", [float("nan"), float("inf")])
def test_a_bound_that_overflowed_vouches_for_no_norm(problem, bound, monkeypatch):
    model, inputs, targets = problem
    grad_fn = clipped_grad(model, loss_fn, clipping_norm=0.1, engine="graph", methods=METHODS)
    true = grad_fn(inputs, targets)
    ghost = convolution.Ghost._channel_squares

    def overflowed(self, grads):
        squares, error = ghost(self, grads)
        return 0.5 * squares, torch.full_like(error, bound)

    monkeypatch.setattr(convolution.Ghost, "_channel_squares", overflowed)
    torch.testing.assert_close(grad_fn(inputs, targets).grad_norms, true.grad_norms, rtol=1e-5, atol=0.0)
