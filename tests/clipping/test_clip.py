"""Norms over all parameters: each as long as roundings could have hidden."""

import pytest
import torch
from torch import nn

from sfumato.clipping import clipped_grad
from sfumato.clipping.clip import global_norms, one_thread, row_norms
from sfumato.clipping.graph.rules import convolution, linear
from sfumato.models.layers import WeightStandardizedConv2d
from tests.clipping.problems import cross_entropy as loss_fn

METHODS = {
    "memory_format": "contiguous",
    "0:conv2d.weight": "conv_ghost",
    "2:conv2d_1.weight": "conv_ghost",
    "6:linear.weight": "ghost",
}


@pytest.fixture
def problem():
    torch.manual_seed(0)
    convolutions = WeightStandardizedConv2d(3, 6, 3), nn.Tanh(), nn.Conv2d(6, 4, 3), nn.GroupNorm(2, 4), nn.Tanh()
    model = nn.Sequential(*convolutions, nn.Flatten(2), nn.Linear(16, 5), nn.Flatten(1), nn.Linear(20, 3))
    return model, torch.randn(5, 3, 8, 8), torch.randint(3, (5,))


def private(model, inputs, engine="graph"):
    augmult = inputs.shape[1] if inputs.ndim == 5 else 0
    settings = {"clipping_norm": 0.1, "augmult": augmult, "methods": METHODS}
    return clipped_grad(model, loss_fn, microbatch_size=5, engine=engine, workers=1, **settings)


@pytest.mark.parametrize("views", [0, 2])
def test_ghost_norms_of_ordinary_images_are_those_of_the_loop(problem, views):
    model, inputs, targets = problem
    if views:
        inputs = torch.stack([inputs, inputs.flip(3)], 1)
    grad_fn = private(model, inputs)
    out, reference = grad_fn(inputs, targets), private(model, inputs, "reference")(inputs, targets)
    assert METHODS.items() <= grad_fn.methods.items()
    torch.testing.assert_close(out.grad_norms, reference.grad_norms, rtol=1e-5, atol=0.0)
    for name, value in reference.grad_sum.items():
        torch.testing.assert_close(out.grad_sum[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("where", [convolution.GhostGrads, linear.GhostGrads])
def test_a_norm_grows_by_what_roundings_could_have_hidden(problem, where, monkeypatch):
    """But for one part in 10,000."""
    model, inputs, targets = problem
    grad_fn = private(model, inputs)
    true = grad_fn(inputs, targets).grad_norms
    share, square_norms, asked = [0.0], where.square_norms, []

    def wider(self):
        squares, error = square_norms(self)
        asked.append(self)
        return squares, error + share[0] * true.square()

    monkeypatch.setattr(where, "square_norms", wider)
    for share[0] in (0.5e-4, 1e-3, 0.1):
        asked.clear()
        norms = grad_fn(inputs, targets).grad_norms
        expected = true * (1 + max(0.0, len(asked) * share[0] - 2e-4)) ** 0.5
        torch.testing.assert_close(norms, expected, rtol=3e-5, atol=0.0)
        assert asked


@pytest.mark.parametrize("bound", [float("nan"), float("inf")])
def test_an_example_whose_bound_overflowed_counts_for_nothing(problem, bound, monkeypatch):
    model, inputs, targets = problem
    grad_fn = private(model, inputs)
    others = grad_fn(inputs[1:], targets[1:]).grad_sum
    channel_squares, once = convolution.GhostGrads._channel_squares, [bound]

    def overflowed(self, grads):
        squares, largest = channel_squares(self, grads)
        largest[0] = once.pop() if once else largest[0]
        return squares, largest

    monkeypatch.setattr(convolution.GhostGrads, "_channel_squares", overflowed)
    out = grad_fn(inputs, targets)
    assert out.grad_norms.isfinite().tolist() == [False, True, True, True, True]
    for name, value in others.items():
        torch.testing.assert_close(out.grad_sum[name], value, rtol=1e-4, atol=1e-5)


def test_the_norm_of_a_whole_gradient_is_that_of_its_parts_together():
    parts = [torch.randn(4, length, dtype=torch.float64) for length in (1, 7, 3000)]
    torch.testing.assert_close(global_norms(parts), torch.cat(parts, dim=1).square().sum(dim=1).sqrt())


def test_a_value_that_is_not_finite_makes_the_norm_so():
    rows = torch.ones(3, 2000)
    rows[0, 1999], rows[1, 5] = torch.nan, torch.inf
    assert row_norms(rows).isfinite().tolist() == [False, False, True]


@pytest.mark.parametrize("length", [513, 577, 1152, 147_456, 2_400_001])
def test_the_norm_of_a_long_row_is_as_exact_as_that_of_a_short_one(length):
    rows = torch.stack([torch.full((length,), 0.3), torch.randn(length, generator=torch.Generator().manual_seed(0))])
    torch.testing.assert_close(row_norms(rows).double(), rows.double().norm(dim=1), rtol=1e-6, atol=0)


def test_little_work_is_done_by_one_thread_and_the_others_come_back():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(KeyError), one_thread(1000):
            assert torch.get_num_threads() == 1
            raise KeyError
        assert torch.get_num_threads() == 2
        with one_thread(10**8):
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
