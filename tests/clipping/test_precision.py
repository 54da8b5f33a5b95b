"""bfloat16 rounds what the network computes, and never what bounds an image's influence."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sfumato.clipping import clipped_grad
from sfumato.clipping.clip import Clip
from sfumato.clipping.graph.rules.site import MaterializedGrads
from sfumato.errors import InputError
from sfumato.models.layers import WeightStandardizedConv2d
from tests.clipping.problems import FIXED as CONTIGUOUS
from tests.clipping.problems import Do, norm
from tests.clipping.problems import cross_entropy as loss_fn


class Net(nn.Module):
    def __init__(self, conv, patches):
        super().__init__()
        self.conv = conv(3, 8, 2, stride=2) if patches else conv(3, 8, 3, padding=1)
        self.norm, self.positions, self.out = nn.GroupNorm(2, 8), nn.Parameter(torch.randn(8)), nn.Linear(8, 4)

    def forward(self, x):
        return self.out(F.silu(self.norm(self.conv(x))).flatten(2).transpose(1, 2) + self.positions).mean(1)


# Methods of the convolution and of the linear layer.
METHODS = {"loop": "rows", "grouped": "rows", "unfold": "rows", "conv_ghost": "ghost", "patch_ghost": "ghost_at_once"}
CASES = [(conv, method) for method in METHODS for conv in (nn.Conv2d, WeightStandardizedConv2d)]
CASES.pop()  # patches have no moments


def problem(conv, seed=0, patches=False):
    torch.manual_seed(seed)
    return Net(conv, patches), torch.randn(6, 2, 3, 8, 8), torch.randint(4, (6,))


def whole(grad_sum):
    return torch.cat([value.flatten() for value in grad_sum.values()]).double()


@pytest.mark.parametrize(("conv", "method"), CASES)
def test_every_clipped_gradient_has_the_norm_that_it_is_said_to_have(conv, method):
    """One example alone, clipped: the sum has norm 1, to the rounding of float32."""
    model, inputs, targets = problem(conv, patches=method == "patch_ghost")
    methods = CONTIGUOUS | {"conv:conv2d.weight": method, "out:linear.weight": METHODS[method]}
    grad_fn = clipped_grad(
        model, loss_fn, clipping_norm=1e-3, augmult=2, engine="graph", precision="bf16", methods=methods
    )
    for scale in (1e-3, 1.0, 1e3):
        for i in range(len(inputs)):
            out = grad_fn(scale * inputs[i : i + 1], targets[i : i + 1])
            assert norm(out.grad_sum) == pytest.approx(1.0, abs=3e-5)
    assert methods.items() <= grad_fn.methods.items()


@pytest.mark.parametrize(
    ("conv", "method", "precision"),
    [(*case, "bf16") for case in CASES] + [(*case, "float32") for case in CASES if "ghost" in case[1]],
)
def test_no_input_makes_one_example_count_for_more_than_one(conv, method, precision):
    """One dominating channel, one dominating pixel, nearly equal pixels, huge and tiny values; clipped just below and
    just above its norm.
    """
    model, inputs, targets = problem(conv, seed=1, patches=method == "patch_ghost")
    inputs[0, :, 0] *= 1e4
    inputs[1, :, :, 3, 3] = 1e5
    inputs[2] = 1.0 + 1e-4 * inputs[2]
    inputs[3] *= 1e-6
    inputs[4] *= 1e8
    methods = CONTIGUOUS | {"conv:conv2d.weight": method, "out:linear.weight": METHODS[method]}
    grad_fn = clipped_grad(
        model, loss_fn, clipping_norm=1.0, augmult=2, engine="graph", precision=precision, methods=methods
    )
    for i, said in enumerate(grad_fn(inputs, targets).grad_norms.tolist()):
        for share in (1e-3, 1 - 1e-6, 1 + 1e-6, 10.0):
            grad_fn._clip = Clip(said * share, rescale=True)
            length = norm(grad_fn(inputs[i : i + 1], targets[i : i + 1]).grad_sum)
            assert length <= 1 + 2e-4  # ghost norms may be off by one part in 10,000
            assert length == pytest.approx(min(1.0, 1 / share), rel=2e-4)
    assert methods.items() <= grad_fn.methods.items()


def test_a_norm_taken_before_rounding_is_seen(monkeypatch):
    """The comparison above can fail: sums of values rounded after their norm was taken."""
    true_sum = MaterializedGrads.weighted_sum

    def rounded(rows, coefficients):
        return true_sum(MaterializedGrads(rows.written_out().bfloat16()), coefficients)

    model, inputs, targets = problem(nn.Conv2d)
    grad_fn = clipped_grad(model, loss_fn, clipping_norm=1e-3, augmult=2, engine="graph", methods=CONTIGUOUS)
    grad_fn(inputs, targets)  # which would refuse such sums
    monkeypatch.setattr(MaterializedGrads, "weighted_sum", rounded)
    lengths = [norm(grad_fn(inputs[i : i + 1], targets[i : i + 1]).grad_sum) for i in range(len(inputs))]
    assert max(abs(length - 1) for length in lengths) > 3e-5


@pytest.mark.parametrize("conv", [nn.Conv2d, WeightStandardizedConv2d])
def test_gradients_are_near_those_of_float32_and_summed_in_float32(conv):
    model, inputs, targets = problem(conv)
    exact, low = (
        clipped_grad(
            model, loss_fn, clipping_norm=1e-3, augmult=2, engine="graph", precision=precision, methods=CONTIGUOUS
        )(inputs, targets)
        for precision in ("float32", "bf16")
    )
    assert {value.dtype for value in low.grad_sum.values()} == {torch.float32}
    torch.testing.assert_close(low.grad_norms, exact.grad_norms, rtol=0.03, atol=0)
    assert F.cosine_similarity(whole(low.grad_sum), whole(exact.grad_sum), dim=0) > 0.999
    assert not torch.equal(whole(low.grad_sum), whole(exact.grad_sum))


@pytest.mark.parametrize(
    "layer",
    [nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True), nn.PReLU(4), nn.LayerNorm(8), nn.Conv2d(4, 4, 1)],
    ids=lambda layer: type(layer).__name__,
)
def test_images_that_the_model_made_wider_meet_weights_in_bf16_too(layer):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), Do(lambda x: x * torch.ones(x.shape[0], 1, 1, 1)), layer, nn.Flatten())
    inputs, targets = torch.randn(6, 3, 8, 8), torch.randint(4, (6,))
    exact, low = (
        clipped_grad(model, loss_fn, clipping_norm=1.0, engine="graph", precision=precision)(inputs, targets)
        for precision in ("float32", "bf16")
    )
    torch.testing.assert_close(low.grad_norms, exact.grad_norms, rtol=0.1, atol=0)
    assert norm(low.grad_sum) <= 6.001


def test_bf16_needs_the_engine_that_rounds_nothing_else():
    with pytest.raises(InputError, match='need engine "graph"'):
        clipped_grad(nn.Linear(2, 2), loss_fn, clipping_norm=1.0, engine="reference", precision="bf16")
    with pytest.raises(InputError, match="Known are float32, tf32, bf16"):
        clipped_grad(nn.Linear(2, 2), loss_fn, clipping_norm=1.0, precision="fp16")
