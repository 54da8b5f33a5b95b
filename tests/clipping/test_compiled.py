"""One compiled graph gives what the operations one by one give, for every size of batch."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sfumato.clipping import clipped_grad
from sfumato.clipping.graph.engine import GraphEngine
from sfumato.models.layers import WeightStandardizedConv2d
from tests.clipping.problems import cross_entropy as loss_fn
from tests.clipping.problems import distance, norm


class Small(nn.Module):
    """A standardised convolution, group norms, positions: ghost norms, closed form and written-out rows.

    Group norm keeps channels that lie together on a CPU; what traces it believes otherwise, and the second one's rows
    are then taken apart.
    """

    def __init__(self):
        super().__init__()
        self.conv = WeightStandardizedConv2d(3, 8, 3, padding=1)
        self.norm = nn.Sequential(nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8))
        self.positions = nn.Parameter(torch.randn(8))
        self.out = nn.Linear(8, 4)

    def forward(self, x):
        x = F.relu(self.norm(self.conv(x))).flatten(2).transpose(1, 2) + self.positions
        return self.out(x).mean(1)


METHODS = {"memory_format": "channels_last", "conv:conv2d.weight": "conv_ghost", "out:linear.weight": "ghost"}


def pair_of(model, methods=METHODS, microbatch_size=8, augmult=2, **settings):
    """Operation by operation, and compiled."""
    settings = {"clipping_norm": 0.5, "engine": "graph", "methods": methods} | settings
    settings |= {"augmult": augmult, "microbatch_size": microbatch_size}
    return [clipped_grad(model, loss_fn, **settings, compile=compile) for compile in (False, True)]


@pytest.fixture(scope="module")
def problem():
    torch.manual_seed(0)
    return Small(), torch.randn(40, 2, 3, 8, 8), torch.randint(4, (40,))


@pytest.fixture(scope="module")
def compiled(problem):
    model, inputs, targets = problem
    grad_fns = pair_of(model, microbatch_size=16)
    for grad_fn in grad_fns:
        grad_fn(inputs[:16], targets[:16])
    return grad_fns


def assert_equal(compiled, inputs, targets):
    eager, fused = (grad_fn(inputs, targets) for grad_fn in compiled)
    torch.testing.assert_close(fused.grad_norms, eager.grad_norms, rtol=1e-5, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(fused.losses, eager.losses, rtol=1e-5, atol=1e-6, equal_nan=True)
    for name, value in eager.grad_sum.items():
        torch.testing.assert_close(fused.grad_sum[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_ten_batches_of_any_size_take_one_compilation(problem, compiled, monkeypatch):
    _, inputs, targets = problem
    monkeypatch.setattr(torch._inductor, "compile", None)
    for size in (16, 1, 40, 3, 17, 5, 31, 32, 0, 8):
        assert_equal(compiled, inputs[:size], targets[:size])


@pytest.mark.slow
@pytest.mark.parametrize("value", [0.0, 1e30, float("nan")])
def test_the_graph_is_used_whatever_the_images_are(problem, compiled, monkeypatch, value):
    """A microbatch that was computed otherwise because of one image would round all others otherwise."""
    _, inputs, targets = problem
    monkeypatch.setattr(GraphEngine, "_run", None)
    inputs = inputs.clone()
    inputs[3] = value
    compiled[1](inputs, targets)


@pytest.mark.slow
def test_new_parameter_values_are_seen(problem, compiled):
    model, inputs, targets = problem
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    assert_equal(compiled, inputs, targets)


@pytest.mark.slow
def test_an_example_that_is_not_finite_does_not_spread(problem, compiled):
    _, inputs, targets = problem
    inputs = inputs.clone()
    inputs[3] = float("nan")
    assert_equal(compiled, inputs, targets)
    out = compiled[1](inputs, targets)
    assert out.grad_norms[3].isnan() and all(value.isfinite().all() for value in out.grad_sum.values())


class PatchesAndTokens(nn.Module):
    """A convolution whose patches lie apart and layers of few positions, as in a vision transformer; last, weights
    without a closed form: the graph has the way back to their parameters in it.
    """

    def __init__(self):
        super().__init__()
        self.conv, self.tokens = nn.Conv2d(3, 8, 4, stride=4), nn.Linear(4, 6)
        self.left, self.right = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.randn(2, 48))

    def forward(self, x):
        return F.linear(F.silu(self.tokens(self.conv(x).flatten(2))).flatten(1), self.left @ self.right)


def test_patches_tokens_and_the_way_back_from_derived_weights(monkeypatch):
    torch.manual_seed(0)
    model, inputs, targets = PatchesAndTokens(), torch.randn(7, 2, 3, 8, 8), torch.randint(4, (7,))
    methods = {"conv:conv2d.weight": "patch_ghost", "tokens:linear.weight": "ghost_at_once"}
    pair = pair_of(model, {"memory_format": "contiguous", **methods}, 4, clipping_norm=0.1)
    assert_equal(pair, inputs, targets)
    assert all(methods.items() <= grad_fn.methods.items() for grad_fn in pair)
    with torch.no_grad():
        model.left.mul_(2.0)
        model.conv.weight.mul_(0.5).add_(0.1)
    assert_equal(pair, inputs, targets)
    monkeypatch.setattr(GraphEngine, "_run", None)
    pair[1](inputs, targets)


@pytest.mark.parametrize(("method", "compile"), [("rows", False), ("ghost", False), ("ghost", True)])
def test_norms_hold_where_an_example_s_positions_cancel(method, compile):
    """Two positions whose gradients are huge and opposite: inner products lose what is left, and must not be believed,
    nor may a sum of float32.
    """
    model = nn.Linear(3, 2, bias=False).float()

    def loss(outputs, weights):  # the gradient is the sum of weights_t x_t over positions t
        return (outputs.sum(2) * weights).sum(1)

    x = torch.tensor([[[1e4, 2e4, 3e4], [1e4, 2e4, 3e4 + 0.0625], [1.0, 0.0, 0.0]]])
    weights = torch.tensor([[1.0, -1.0, 0.5]])
    chosen = {"memory_format": "contiguous", "model:linear.weight": method}
    grad_fn = clipped_grad(model, loss, clipping_norm=0.1, engine="graph", methods=chosen, compile=compile)
    out = grad_fn(x, weights)
    assert grad_fn.methods == chosen
    assert out.grad_sum["weight"].norm().item() <= 1 + 1e-4
    true = 2**0.5 * (0.5**2 + 0.0625**2) ** 0.5
    assert out.grad_norms.item() >= true * (1 - 1e-4)
    if method == "rows":  # what was written out is summed
        assert out.grad_norms.item() == pytest.approx(true, rel=1e-3)


@pytest.mark.slow
def test_bfloat16_compiled_is_bfloat16_and_keeps_the_sensitivity():
    """Both round to bfloat16, the compiled graph less often; one clipped example has exactly the norm that it is said
    to have.
    """
    torch.manual_seed(0)
    model, inputs, targets = Small(), torch.randn(16, 2, 3, 8, 8), torch.randint(4, (16,))
    low = pair_of(model, clipping_norm=1e-3, precision="bf16")
    exact = pair_of(model, clipping_norm=1e-3)[False]
    eager, fused, true = (grad_fn(inputs, targets) for grad_fn in (*low, exact))
    # No further from float32 than eager bfloat16 is, to a factor, and not float32 itself.
    rounding = (eager.grad_norms / true.grad_norms - 1).abs().max()
    assert (fused.grad_norms / eager.grad_norms - 1).abs().max() <= 2 * rounding
    assert (fused.grad_norms / true.grad_norms - 1).abs().max() >= 0.01 * rounding
    assert distance(fused.grad_sum, eager.grad_sum) <= 2 * distance(eager.grad_sum, true.grad_sum)
    for i in range(4):
        alone = low[True](inputs[i : i + 1], targets[i : i + 1])
        assert alone.grad_norms[0] > 1e-3  # it is clipped
        assert norm(alone.grad_sum) == pytest.approx(low[True].sensitivity, rel=1e-5)
        assert all(value.dtype == torch.float32 for value in alone.grad_sum.values())
