"""One compiled graph gives what the operations one by one give, for every size of batch."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sfumato.clipping import clipped_grad
from sfumato.errors import InputError
from sfumato.nn import WeightStandardizedConv2d


class Small(nn.Module):
    """A standardised convolution, group norm, positions: ghost norms, closed form and written-out rows."""

    def __init__(self):
        super().__init__()
        self.conv = WeightStandardizedConv2d(3, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.positions = nn.Parameter(torch.randn(8))
        self.out = nn.Linear(8, 4)

    def forward(self, x):
        x = F.relu(self.norm(self.conv(x))).flatten(2).transpose(1, 2) + self.positions
        return self.out(x).mean(1)


def loss_fn(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="none")


@pytest.fixture(scope="module")
def problem():
    torch.manual_seed(0)
    return Small(), torch.randn(40, 2, 3, 8, 8), torch.randint(4, (40,))


@pytest.fixture(scope="module")
def compiled(problem):
    model, inputs, targets = problem
    methods = {"memory_format": "contiguous", "conv:conv2d.weight": "conv_ghost", "out:linear.weight": "ghost"}
    grad_fns = [
        clipped_grad(model, loss_fn, clipping_norm=0.5, augmult=2, microbatch_size=16, engine="graph", methods=methods, compile=compile)
        for compile in (False, True)
    ]
    for grad_fn in grad_fns:
        grad_fn(inputs[:16], targets[:16])
    return grad_fns


def assert_equal(compiled, inputs, targets):
    eager, fused = (grad_fn(inputs, targets) for grad_fn in compiled)
    torch.testing.assert_close(fused.grad_norms, eager.grad_norms, rtol=1e-5, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(fused.losses, eager.losses, rtol=1e-5, atol=1e-6, equal_nan=True)
    for name, value in eager.grad_sum.items():
        torch.testing.assert_close(fused.grad_sum[name], value, rtol=1e-4, atol=1e-5)


def test_ten_batches_of_any_size_take_one_compilation(problem, compiled):
    _, inputs, targets = problem
    with torch.compiler.set_stance("fail_on_recompile"):
        for size in (16, 1, 40, 3, 17, 5, 31, 32, 0, 8):
            assert_equal(compiled, inputs[:size], targets[:size])


def test_new_parameter_values_are_seen(problem, compiled):
    model, inputs, targets = problem
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    assert_equal(compiled, inputs, targets)


def test_an_example_that_is_not_finite_does_not_spread(problem, compiled):
    _, inputs, targets = problem
    inputs = inputs.clone()
    inputs[3] = float("nan")
    assert_equal(compiled, inputs, targets)
    out = compiled[1](inputs, targets)
    assert out.grad_norms[3].isnan() and all(value.isfinite().all() for value in out.grad_sum.values())


def test_engines_that_cannot_be_compiled_say_so(problem):
    model, inputs, targets = problem
    with pytest.raises(InputError, match='need engine "graph"'):
        clipped_grad(model, loss_fn, clipping_norm=1.0, engine="func", compile=True)
