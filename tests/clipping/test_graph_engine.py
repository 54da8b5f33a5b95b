"""The graph engine against a loop over single images: every method of every rule, and what it must refuse."""

import dataclasses
import sys

import pytest
import timm.layers
import torch
import torchvision
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from sfumato import torch_internals
from sfumato.clipping import clipped_grad
from sfumato.clipping.graph import engine as graph_engine
from sfumato.clipping.graph.engine import GraphEngine
from sfumato.clipping.graph.export import trace
from sfumato.clipping.graph.passes import Linear, MaxPool2d
from sfumato.clipping.graph.rules import GHOSTS, normalization
from sfumato.clipping.graph.rules.site import MaterializedGrads
from sfumato.clipping.protocol import Batch, Speed
from sfumato.errors import InputError
from sfumato.models.layers import WeightStandardizedConv2d
from sfumato.torch_internals import arguments_of
from tests.clipping.problems import Do, Made, clipped, cross_entropy, distance, gradients, norm


def loss_fn(outputs, targets):
    return F.cross_entropy(outputs.flatten(1), targets, reduction="none")


def problem(num_examples, augmult, shape, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    views = (augmult,) if augmult else ()
    inputs = torch.randn(num_examples, *views, *shape, generator=generator, dtype=dtype)
    return inputs, torch.randint(2, (num_examples,), generator=generator)


def assert_exact(model, shape, augmult=0, clipping_norm=1.0, methods=None, num_examples=5):
    model = model.double()
    inputs, targets = problem(num_examples, augmult, shape)
    grad_fn = clipped_grad(
        model, loss_fn, clipping_norm=clipping_norm, augmult=augmult, microbatch_size=3, engine="graph", methods=methods
    )
    out = grad_fn(inputs, targets)
    own = list(gradients(model, inputs, targets, augmult, loss_fn=loss_fn))
    total = clipped(own, clipping_norm)
    assert out.grad_norms.tolist() == pytest.approx([norm(gradient) for gradient in own], rel=1e-9, abs=1e-12)
    assert distance(out.grad_sum, total) <= 1e-9 * norm(total)
    return grad_fn


@pytest.mark.parametrize("make", [nn.Conv2d, WeightStandardizedConv2d])
def test_convolutions(make):
    torch.manual_seed(0)
    assert_exact(
        nn.Sequential(make(4, 5, 3, stride=2, padding=1), nn.SiLU(), make(5, 3, 2), nn.SiLU(), nn.Flatten()),
        (4, 7, 6),
        augmult=2,
    )


# Each kind of convolution, method by method, is in test_rules.py.
CONVOLUTIONS = {
    "plain": {"kernel_size": 3},
    "no_bias": {"kernel_size": 3, "bias": False},
    "same": {"kernel_size": 3, "padding": "same", "dilation": 2},
    "reflect": {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"},
    "circular": {"kernel_size": 3, "padding": 2, "padding_mode": "circular"},
    "replicate": {"kernel_size": 3, "padding": 1, "padding_mode": "replicate"},
    "grouped_strided_dilated": {"kernel_size": 2, "groups": 4, "stride": 2, "dilation": 2, "padding": 1},
}

LAYERS = {
    **{name: nn.Conv2d(4, 4, **settings) for name, settings in CONVOLUTIONS.items()},
    "group_norm": nn.GroupNorm(2, 4),
    "instance_norm": nn.InstanceNorm2d(4, affine=True),
    "layer_norm": nn.LayerNorm([4, 7, 6]),
    "prelu": nn.PReLU(4),
    "transposed": nn.ConvTranspose2d(4, 3, 3, stride=2),
    "standardized": WeightStandardizedConv2d(4, 4, 3),
    "standardized_grouped": WeightStandardizedConv2d(4, 4, 3, groups=2, stride=2),
    "max_pool": nn.Sequential(nn.Conv2d(4, 4, 2), nn.MaxPool2d(2)),
    "average_pool": nn.Sequential(nn.Conv2d(4, 4, 2), nn.AdaptiveAvgPool2d(3)),
    "linear": nn.Linear(6, 3),
}


# Whose way depends on the order of images in memory.
ORDERED = ["group_norm", "instance_norm", "standardized", "max_pool"]


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize(
    ("name", "memory_format", "augmult"),
    [(name, "channels_last", 3) for name in LAYERS] + [(name, "contiguous", 2) for name in ORDERED],
)
def test_layers(name, memory_format, augmult):
    """Where other engines were silently wrong."""
    layer = nn.Sequential(LAYERS[name], nn.SiLU(), nn.Flatten())
    assert_exact(layer, (4, 7, 6), augmult, methods={"memory_format": memory_format})


@pytest.mark.parametrize(("channels", "levels", "dtype"), [(3, 1, torch.float32), (16, 1000, torch.bfloat16)])
@pytest.mark.parametrize(
    "window",
    [
        ([2, 2],),
        ([2, 2], [2, 2]),
        ([3, 3], [2, 2], [1, 1]),
        ([2, 3], [1, 2], [1, 0], [2, 1]),
        ([3, 3], [2, 2], 0, 1, True),
    ],
    ids=str,
)
def test_max_pooling_is_pytorchs_bit_for_bit(window, channels, levels, dtype):
    """Its gradient goes to the first of equal values, and to what is no number."""
    generator = torch.Generator().manual_seed(0)
    maps = (torch.randn(4, channels, 9, 8, generator=generator) * levels).round().to(dtype)
    maps[1, 0, 4, 4] = torch.nan
    found, true = (maps.clone().requires_grad_() for _ in range(2))
    operation = torch.ops.aten.max_pool2d.default
    given = arguments_of(operation, (found, *window), {})
    pooled, expected = MaxPool2d.apply(*given.values()), operation(true, *window)
    weights = torch.randn(expected.shape, generator=generator).to(dtype)
    torch.testing.assert_close(pooled, expected, rtol=0, atol=0, equal_nan=True)
    of_found, of_true = torch.autograd.grad(pooled, found, weights), torch.autograd.grad(expected, true, weights)
    assert torch.equal(*of_found, *of_true) and torch.count_nonzero(*of_found)


@pytest.mark.parametrize(
    ("method", "settings", "slow"),
    [
        ("loop", {"stride": 2, "padding": 1}, True),
        ("grouped", {"stride": 2, "padding": 1}, True),
        ("unfold", {"stride": 2, "padding": 1}, True),
        ("conv_ghost", {"stride": 2, "padding": 1}, True),
        ("conv_ghost", {}, True),
        ("conv_ghost", {}, False),
    ],
    ids=str,
)
def test_convolutions_of_one_tap_by_either_library(method, settings, slow, set_threads, monkeypatch):
    """By one thread, which is when PyTorch asks MKL."""
    set_threads(1)
    monkeypatch.setattr(torch_internals, "_has_slow_products", lambda: slow and torch.backends.mkldnn.is_available())
    layer = nn.Sequential(nn.Conv2d(3, 8, 1, **settings), nn.SiLU(), nn.Conv2d(8, 6, 1, **settings), nn.Flatten())
    methods = {"memory_format": "contiguous", "2:conv2d_1.weight": method}
    assert methods.items() <= assert_exact(layer, (3, 9, 8), methods=methods).methods.items()


@pytest.mark.parametrize(
    ("shape", "has_bias", "slow"),
    [((5,), True, True), ((5,), False, True), ((5, 3), True, True), ((2, 3, 4), False, True), ((2, 3, 4), True, False)],
    ids=str,
)
def test_products_are_pytorchs_by_either_library(shape, has_bias, slow, monkeypatch):
    monkeypatch.setattr(torch_internals, "_has_slow_products", lambda: slow and torch.backends.mkldnn.is_available())
    layer = nn.Linear(70, 40, has_bias)
    weight, bias = layer.weight.detach(), layer.bias.detach() if has_bias else None
    images = torch.randn(*shape, 70, requires_grad=True)
    found, true = Linear.apply(images, weight, bias), layer(images)
    with torch.no_grad(), torch_internals.QuickProducts():
        assert torch.equal(layer(images), found)
        assert F.linear(images, weight, torch.ones(1)).shape == found.shape
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            layer(images[..., 1:])
    torch.testing.assert_close(found, true, rtol=1e-5, atol=1e-5)
    for weights in torch.randn(*shape, 40), torch.ones(()).expand(*shape, 40):
        of_found, of_true = (torch.autograd.grad(one, images, weights, retain_graph=True)[0] for one in (found, true))
        torch.testing.assert_close(of_found, of_true, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cell", [nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent_layers_are_products_and_sums(cell):
    """One operation for all their steps, of which each row is not known to be by itself."""
    torch.manual_seed(0)
    assert_exact(Made(lambda self, x: self.layer(x)[0].flatten(1), layer=cell(4, 3, batch_first=True)), (5, 4))


def test_layer_norms_of_rows_that_lie_second():
    torch.manual_seed(0)
    tokens = Made(lambda self, x: self.norm(x.transpose(0, 1)).square().sum(0), norm=nn.LayerNorm(4))
    assert_exact(tokens, (5, 4), augmult=2)


class Tokens(nn.Module):
    """A class token, positions, a scale for each channel, attention with a table in its mask."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.other = nn.Parameter(torch.randn(4))
        self.positions = nn.Parameter(torch.randn(1, 6, 4))
        self.scale = nn.Parameter(torch.randn(4))
        self.table = nn.Parameter(torch.randn(11))
        self.qkv = nn.Linear(4, 12)
        self.register_buffer("distance", (torch.arange(6)[:, None] - torch.arange(6)[None]) + 5)

    def forward(self, x):
        x = (
            torch.cat([self.token.expand(x.shape[0], -1, -1), self.other.repeat(x.shape[0], 1, 1), x], dim=1)
            + self.positions
        )
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 2)).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=self.table[self.distance])
        return (x.transpose(1, 2).flatten(2) * self.scale)[:, 0]


def tied():
    """One weight used by two layers, once transposed and scaled by a parameter."""
    return Made(
        lambda self, x: F.linear(F.silu(F.linear(x, self.weight)), self.weight.T * self.gain),
        weight=torch.randn(3, 4),
        gain=torch.tensor(0.7),
    )


def low_rank():
    """A frozen layer with a trainable product added."""
    return Made(
        lambda self, x: F.linear(x, self.base.weight + self.b @ self.a, self.base.bias),
        base=nn.Linear(4, 5).requires_grad_(False),
        a=torch.randn(2, 4),
        b=torch.randn(5, 2),
    )


def windows(self, x):
    """Rows that multiply: each image is cut into four windows, and put together again."""
    windows = self.inner(x.reshape(-1, 3, 3))  # (rows * 4, 3, 3)
    windows = windows.unflatten(0, (-1, 4)) + self.bias[..., None]
    return self.outer(windows.reshape(x.shape[0], 1, 12, 3)).flatten(1)


def positions_first(self, x):
    """As in torchvision's attention: (positions * rows, features), rows innermost."""
    y = self.layer(x.transpose(0, 1).flatten(0, 1))
    return y.unflatten(0, (x.shape[1], -1)).transpose(0, 1).flatten(1)


def products(self, x):
    """Matrix products and einsum instead of linear."""
    return torch.einsum("nt,tu->nu", torch.addmm(self.d, x @ self.a, self.b).tanh(), self.c) / self.d - self.d


def norm_of_tokens(self, x):
    """Group norm of (rows * positions, channels): one image lies in several of its rows."""
    return self.norm(x.flatten(0, 1)).view_as(x).flatten(1)


def assigned(self, x):
    """Writes into slices, and takes its type from the images."""
    y = torch.zeros_like(x)
    y[:, 1:] = self.layer(x)[:, 1:] * self.scale.type_as(x)
    y[:, :1] += x[:, :1] * self.scale
    return y


def norm_of_every_other(self, x):
    """Of rows that lie apart in memory."""
    return torch.sin(self.norm(x[..., ::2])).flatten(1)


def in_place(self, x):
    """A weight made of two parameters, the second by writing into a part of a copy of the first."""
    weight = self.weight.clone()
    weight[:2].mul_(self.scale)
    return F.linear(x, weight)


def scaled_in_place():
    return Made(in_place, weight=torch.randn(3, 4), scale=torch.randn(()))


SQUARES = {name: torch.randn(4, 4) for name in "abc"}
OTHERS = {
    "scaled_in_place": (scaled_in_place(), (4,)),
    "norm_of_tokens": (Made(norm_of_tokens, norm=nn.GroupNorm(2, 4)), (3, 4)),
    "norm_of_every_other_place": (Made(norm_of_every_other, norm=nn.GroupNorm(2, 4)), (4, 6)),
    "norm_of_every_other_value": (Made(norm_of_every_other, norm=nn.GroupNorm(2, 4)), (8,)),
    "assigned": (Made(assigned, layer=nn.Linear(4, 4), scale=torch.randn(())), (4,)),
    "tokens": (Tokens(), (4, 4)),
    "tied": (tied(), (4,)),
    "low_rank": (low_rank(), (4,)),
    "windows": (Made(windows, inner=nn.Linear(3, 3), outer=nn.Conv2d(1, 2, 1), bias=torch.randn(4, 1)), (4, 3, 3)),
    "positions_first": (Made(positions_first, layer=nn.Linear(4, 4)), (3, 4)),
    "products": (Made(products, **SQUARES, d=torch.rand(4) + 1), (4,)),
    "embedding": (nn.Sequential(nn.Linear(4, 4), nn.PReLU(4), nn.LayerNorm(4), nn.RMSNorm(4)), (4,)),
    "one_dimension": (nn.Sequential(nn.Conv1d(2, 3, 3, padding=1), nn.SiLU(), nn.Flatten()), (2, 5)),
    "three_dimensions": (nn.Sequential(nn.Conv3d(1, 2, 2), nn.SiLU(), nn.Flatten()), (1, 3, 3, 4)),
    "transposed": (
        nn.Sequential(nn.ConvTranspose2d(2, 3, 3, stride=2, output_padding=1), nn.SiLU(), nn.Flatten()),
        (2, 3, 3),
    ),
    "weight_norm": (nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), (4,)),
}


# Without views, those whose rows lie otherwise than one after another.
@pytest.mark.parametrize(
    ("name", "augmult"),
    [(name, 3) for name in OTHERS] + [(name, 0) for name in ("norm_of_tokens", "tokens", "windows", "positions_first")],
)
def test_other_operations(name, augmult):
    model, shape = OTHERS[name]
    assert_exact(model, shape, augmult)


@pytest.mark.parametrize(
    ("limit", "examples"), [pytest.param(65_535, 256, marks=pytest.mark.slow), (1_000, 17), (16, 3)]
)
def test_group_norm_never_asks_for_more_groups_at_once_than_cuda_takes(limit, examples, monkeypatch):
    """Its backward pass fails beyond, with another error than that of memory."""
    group_norm = F.group_norm

    def kernel(rows, num_groups, *args, **kwargs):
        assert num_groups <= limit, "CUDA error: invalid configuration argument"
        return group_norm(rows, num_groups, *args, **kwargs)

    monkeypatch.setattr(normalization, "_MAX_GROUPS", limit)
    model = nn.Sequential(nn.Conv2d(1, 16, 1, bias=False), nn.GroupNorm(16, 16), nn.SiLU(), nn.Flatten()).double()
    inputs, targets = problem(examples, 16, (1, 2, 2))
    settings = {"clipping_norm": 1.0, "augmult": 16, "methods": {"memory_format": "contiguous"}}
    true = clipped_grad(model, loss_fn, **settings, engine="reference")(inputs, targets)
    monkeypatch.setattr(normalization.F, "group_norm", kernel)
    grad_fn = clipped_grad(model, loss_fn, **settings, engine="graph", microbatch_size=examples)
    out = grad_fn(inputs, targets)
    assert {site.method for site in grad_fn.site_reports if site.operation == "group_norm"} == {"per_row"}
    torch.testing.assert_close(out.grad_sum, true.grad_sum)
    torch.testing.assert_close(out.grad_norms, true.grad_norms)


def test_weight_standardisation_is_recognised_and_keeps_to_one_pass():
    model = nn.Sequential(WeightStandardizedConv2d(3, 4, 3), nn.SiLU(), nn.Flatten())
    kinds = {group.weights[0]: group.kind for group in trace(model, torch.zeros(1, 3, 6, 6)).groups}
    assert sorted(kinds.values()) == ["parameter", "standardized"]


@pytest.mark.parametrize("gain_is_zero", [True, False])
def test_a_gain_of_zero_hides_nothing_nor_does_a_kernel_that_standardisation_leaves_alone(gain_is_zero):
    """So small that the clamp binds: then J has no direction that it shortens."""
    torch.manual_seed(0)
    model = nn.Sequential(WeightStandardizedConv2d(3, 4, 3), nn.SiLU(), nn.Flatten())
    with torch.no_grad():
        if gain_is_zero:
            model[0].gain.zero_()
        else:
            model[0].weight[:2] *= 1e-4
            model[0].weight[3] = 0.5
    assert_exact(model, (3, 6, 6), augmult=2)


def test_methods_are_recorded_and_repeated():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.SiLU(), nn.Flatten(), nn.Linear(64, 3))
    inputs, targets = problem(6, 0, (3, 6, 6), dtype=torch.float32)
    first = clipped_grad(model, loss_fn, clipping_norm=1.0, engine="graph")
    out = first(inputs, targets)
    again = clipped_grad(model, loss_fn, clipping_norm=1.0, engine="graph", methods=first.methods)
    repeated = again(inputs, targets)
    assert again.methods == first.methods
    assert all(torch.equal(out.grad_sum[name], repeated.grad_sum[name]) for name in out.grad_sum)
    assert torch.equal(out.grad_norms, repeated.grad_norms)


def test_with_a_memory_format_alone_nothing_is_measured(monkeypatch):
    monkeypatch.setattr("sfumato.clipping.graph.passes.fastest", None)
    model = nn.Sequential(WeightStandardizedConv2d(3, 4, 3), nn.SiLU(), nn.Flatten(), nn.Linear(64, 3))
    for augmult in (0, 4):
        grad_fn = assert_exact(model, (3, 6, 6), augmult, methods={"memory_format": "contiguous"})
        assert len(grad_fn.methods) == 5


def test_a_weight_at_several_places_is_never_left_to_ghost_norms():
    engine = GraphEngine(tied().double(), loss_fn, torch.zeros(1, 4, dtype=torch.float64), Speed())
    inputs, targets = problem(4, 0, (4,))
    batch = Batch(inputs[:, None], (targets[:, None],), torch.ones(4, 1).double(), torch.ones(4, dtype=torch.bool))
    engine.choose_methods(batch)
    assert not set(engine.methods.values()) & set(GHOSTS)


@pytest.mark.parametrize(
    "mixing",
    [Do(lambda x: x - x.mean(0)), Do(lambda x: x.flip(0)), nn.BatchNorm1d(4, track_running_stats=False)],
    ids=["mean", "shuffled", "batch_norm"],
)
def test_a_graph_that_mixes_examples_is_refused_by_name(mixing):
    with pytest.raises(InputError, match="mixes examples|what a row gives could depend on the others"):
        trace(nn.Sequential(nn.Linear(4, 4), mixing, nn.Linear(4, 2)), torch.zeros(1, 4))


def counted(self, x):
    """Depends on a plain number of rows, which the tracer takes for a constant."""
    return self.layer(x).reshape(len(x), 2)


def test_a_model_that_cannot_be_traced_is_refused_with_the_reason_and_auto_takes_another_engine():
    inputs, targets = problem(3, 0, (4,), dtype=torch.float32)
    model = Made(counted, layer=nn.Linear(4, 2))
    with pytest.raises(InputError, match="cannot be traced"):
        clipped_grad(model, loss_fn, clipping_norm=1.0, engine="graph")(inputs, targets)
    grad_fn = clipped_grad(model, loss_fn, clipping_norm=1.0, engine="auto")
    grad_fn(inputs, targets)
    assert grad_fn.engine == "func"


TELLS_ROWS = {
    "times": nn.Sequential(nn.Linear(4, 2), Do(lambda x: x * x.shape[0])),
    "times_dropout": nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.5), Do(lambda x: x * x.shape[0])),
    "table": Made(lambda self, x: x * self.table[: x.shape[0]], table=torch.randn(64, 4)),
}


@pytest.mark.parametrize("name", TELLS_ROWS)
def test_a_model_that_depends_on_the_number_of_rows_is_refused(name):
    with pytest.raises(InputError, match="computes with the number of rows|cannot be traced for any number"):
        trace(TELLS_ROWS[name], torch.zeros(1, 4))


def test_a_parameter_that_the_model_returns_is_not_lost():
    """Its gradient arises in the loss, where no site is."""
    inputs, targets = problem(3, 0, (4,))
    parts = {"layer": nn.Linear(4, 2), "scale": torch.tensor(0.5)}
    model = Made(lambda self, x: (self.layer(x) * self.scale, self.scale), **parts).double()

    def loss(outputs, targets):
        return loss_fn(outputs[0], targets) + outputs[1].square()

    with pytest.raises(InputError, match="value of all rows"):
        clipped_grad(model, loss, clipping_norm=1.0, engine="graph")(inputs, targets)
    auto, reference = (
        clipped_grad(model, loss, clipping_norm=1.0, engine=engine)(inputs, targets) for engine in ("auto", "reference")
    )
    torch.testing.assert_close(auto.grad_sum, reference.grad_sum)


def test_a_weight_derived_in_low_precision_is_refused():
    model = nn.Sequential(WeightStandardizedConv2d(3, 4, 3), nn.Flatten()).bfloat16()
    with pytest.raises(InputError, match="rounded on the way back"):
        trace(model, torch.zeros(1, 3, 6, 6, dtype=torch.bfloat16))


def cast_weight(self, x):
    return F.linear(x.bfloat16(), self.layer.weight.bfloat16()).float() + self.layer.bias


def test_a_weight_that_the_model_itself_casts_is_left_to_another_engine():
    """Pulled back through the cast, the clipped sum of many would be rounded by more than one example's share."""
    model = Made(cast_weight, layer=nn.Linear(4, 2))
    with pytest.raises(InputError, match="computed from parameter 'layer.weight' in torch.bfloat16"):
        trace(model, torch.zeros(1, 4))
    torch.manual_seed(0)
    inputs, targets = torch.randn(1, 4).expand(256, 4) + 0.3 * torch.randn(256, 4), torch.zeros(256, dtype=torch.long)
    grad_fn = clipped_grad(model, loss_fn, clipping_norm=0.1)
    everyone, all_but_one = grad_fn(inputs, targets).grad_sum, grad_fn(inputs[1:], targets[1:]).grad_sum
    assert grad_fn.engine == "func" and distance(everyone, all_but_one) <= 1 + 1e-4


class Repeated(nn.Module):
    """One convolution at two places, a standardised one, a plain one, and a weight that is a product."""

    def __init__(self):
        super().__init__()
        self.twice, self.standardized, self.plain = (
            nn.Conv2d(4, 4, 3, padding=1),
            WeightStandardizedConv2d(4, 6, 3),
            nn.Conv2d(6, 4, 3),
        )
        self.left, self.right = nn.Parameter(torch.randn(5, 2)), nn.Parameter(torch.randn(2, 36))

    def forward(self, x):
        x = self.twice(self.twice(x).tanh()).tanh()
        x = self.plain(self.standardized(x).tanh()).tanh()
        return F.conv2d(x, (self.left @ self.right).view(5, 4, 3, 3)).mean((2, 3))


@pytest.mark.parametrize("method", ["loop", "grouped", "unfold"])
def test_gradients_in_blocks(method, monkeypatch):
    """Whatever is done with them afterwards; where a weight is a parameter they are never put together."""
    monkeypatch.setattr("sfumato.clipping.graph.rules.convolution._MAX_IN_ONE", 0)
    monkeypatch.setattr("sfumato.clipping.graph.rules.convolution._BLOCK", 300)  # two examples of most
    monkeypatch.setattr("sfumato.clipping.graph.weights._FEW", 0)
    put_together, written_out = [], MaterializedGrads.written_out
    monkeypatch.setattr(
        MaterializedGrads,
        "written_out",
        lambda self: put_together.append((len(self.blocks), self.shape)) or written_out(self),
    )
    torch.manual_seed(0)
    model, shape, augmult = Repeated(), (4, 9, 9), 2
    keys = clipped_grad(
        model, loss_fn, clipping_norm=1.0, augmult=augmult, engine="graph", methods={"memory_format": "contiguous"}
    )
    keys(*problem(2, augmult, shape, dtype=torch.float32))
    methods = {
        key: method if "conv2d" in key and key.endswith("weight") else name for key, name in keys.methods.items()
    }
    put_together.clear()
    assert assert_exact(model, shape, augmult, methods=methods).methods == methods
    assert {shape for blocks, shape in put_together if blocks > 1} == {(5, 4, 3, 3)}


def gains(self, x):
    """Numbers as parameters: one that scales the images' features, one that scales a weight, one in a vector of one."""
    weight = self.scale * self.out.weight
    return F.linear((self.conv(x) * self.gain).flatten(1).tanh(), weight, self.out.bias) + self.shift


def test_parameters_that_are_numbers():
    torch.manual_seed(0)
    numbers = {name: torch.tensor(value) for name, value in {"gain": 0.5, "scale": 2.0, "shift": [0.1]}.items()}
    assert_exact(Made(gains, conv=nn.Conv2d(2, 3, 3), out=nn.Linear(12, 3), **numbers), (2, 4, 4), augmult=2)


def test_a_closed_form_that_holds_again_finds_what_it_needs():
    """Weights so small that standardisation leaves them alone, when methods are chosen, and not so afterwards; beside
    others that it never leaves alone.
    """
    torch.manual_seed(0)
    conv, other = WeightStandardizedConv2d(3, 16, 4, stride=4), WeightStandardizedConv2d(16, 4, 1)
    model = nn.Sequential(conv, nn.Tanh(), other, nn.Tanh(), nn.Flatten(), nn.Linear(16, 4))
    values = conv.weight.detach().clone()
    methods = {"memory_format": "contiguous", "0:conv2d.weight": "patch_ghost"}
    grad_fn = clipped_grad(model, loss_fn, clipping_norm=1.0, engine="graph", methods=methods)
    inputs, targets = problem(4, 0, (3, 8, 8), dtype=torch.float32)
    for scale in (1e-25, 1.0):
        with torch.no_grad():
            conv.weight.copy_(scale * values)
        norms = grad_fn(inputs, targets).grad_norms
    torch.testing.assert_close(
        norms, clipped_grad(model, loss_fn, clipping_norm=1.0, engine="reference")(inputs, targets).grad_norms
    )


def unused(self, x):
    """A weight with one use that no output sees and one that only decides, besides the one that counts."""
    y = self.layer(x)
    self.layer(self.norm(x))
    return torch.where(y > self.layer.bias, y, 0.5 * y) + self.norm(y)


def test_uses_that_do_not_reach_the_loss_contribute_nothing():
    torch.manual_seed(0)
    assert_exact(Made(unused, layer=nn.Linear(4, 4), norm=nn.GroupNorm(2, 4)), (4,), augmult=2)


def test_methods_of_another_model_are_not_believed():
    """GhostGrads norms of a tied weight, or a bias rule for a square weight, would be silently wrong."""
    assert_exact(
        tied(),
        (4,),
        methods={"memory_format": "contiguous", "model:linear.weight": "ghost", "model:linear_1.weight": "ghost"},
    )
    grad_fn = assert_exact(
        nn.Linear(2, 2),
        (2,),
        methods={"memory_format": "contiguous", "model:linear.weight": "bias", "model:linear.bias": "x"},
    )
    assert grad_fn.methods["model:linear.weight"] in ("rows", "ghost")
    torch.manual_seed(0)
    patches, key = (
        nn.Sequential(WeightStandardizedConv2d(2, 6, 2, stride=2), nn.SiLU(), nn.Flatten()),
        "0:conv2d.weight",
    )
    grad_fn = assert_exact(patches, (2, 4, 4), methods={"memory_format": "contiguous", key: "patch_ghost"})
    assert grad_fn.methods[key] != "patch_ghost"  # which cannot say what standardisation needs
    plain = nn.Sequential(nn.Conv2d(2, 6, 2, stride=2), nn.SiLU(), nn.Flatten())
    assert (
        assert_exact(plain, (2, 4, 4), methods={"memory_format": "contiguous", key: "patch_ghost"}).methods[key]
        == "patch_ghost"
    )


@pytest.mark.parametrize("fault", ["a site is left out", "an operation writes past the labels"])
def test_planted_faults_are_seen(fault, monkeypatch):
    """Others are in test_engine_check.py."""
    torch.manual_seed(0)
    model, shape = nn.Sequential(nn.Conv2d(2, 3, 2), nn.SiLU(), nn.Flatten(), nn.Linear(12, 3)), (2, 3, 3)
    if fault == "a site is left out":
        monkeypatch.setattr(graph_engine, "trace", lambda *args: without_first_site(trace(*args)))
    else:
        monkeypatch.setattr(sys.modules["sfumato.clipping.graph.export"], "_writes", lambda program: False)
        model, shape = scaled_in_place(), (4,)
    with pytest.raises((InputError, RuntimeError)):
        assert_exact(model, shape, augmult=2)


def without_first_site(traced):
    return dataclasses.replace(traced, sites=dict(list(traced.sites.items())[1:]))


class Asked(TorchDispatchMode):
    """How often a value is asked for, or which values are true: on a GPU, each time would be a wait for it."""

    count, asks = 0, (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
    indexes = torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default, torch.ops.aten.index_put.default

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        by_mask = operation in self.indexes and any(each is not None and each.dtype == torch.bool for each in args[1])
        self.count += by_mask or operation in self.asks
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("network", "engine"),
    [("convolutions", "graph"), ("convolutions", "func"), ("attention", "graph")],
)
def test_no_microbatch_waits_for_the_device(network, engine):
    layers = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), nn.Flatten(), nn.Linear(32, 2)
    convolution = WeightStandardizedConv2d(3, 4, 3)
    model, shape = {
        "convolutions": (nn.Sequential(convolution, nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)), (3, 8, 8)),
        "attention": (nn.Sequential(*layers), (4, 8)),
    }[network]
    methods = {"memory_format": "contiguous", "0:conv2d.weight": "conv_ghost"}
    grad_fn = clipped_grad(model, loss_fn, clipping_norm=1.0, microbatch_size=2, engine=engine, methods=methods)
    inputs, targets = problem(2, 0, shape, torch.float32)
    engine, batch = grad_fn.prepare(inputs, targets).engine, grad_fn._batch(inputs, [targets])
    evaluated = engine.evaluate()
    with torch.no_grad():
        engine.clipped_sum(torch.ones_like, evaluated, batch)  # asks what holds for all microbatches
        with Asked() as asked:
            engine.clipped_sum(torch.ones_like, evaluated, batch)
            assert not asked.count
            assert batch.inputs[batch.is_real].isfinite().all() and asked.count == 2  # it can count


@pytest.mark.parametrize("compile", [False, True])
def test_sums_share_no_memory_and_add_up_over_microbatches(compile):
    """Autograd gives a and b the same tensor, and every value of c the same number."""
    parts = {"a": torch.randn(3, 4), "b": torch.randn(3, 4), "c": torch.randn(5)}
    model = Made(lambda self, x: F.linear(x, self.a + self.b) * self.c.sum(), **parts).double()
    inputs, targets = problem(7, 0, (4,))
    grad_fn = clipped_grad(model, loss_fn, clipping_norm=1.0, microbatch_size=2, engine="graph", compile=compile)
    own = list(gradients(model, inputs, targets))
    for rows in (7, 2):  # several microbatches, and one
        grad_sum = grad_fn(inputs[:rows], targets[:rows]).grad_sum
        assert distance(grad_sum, clipped(own[:rows], 1.0)) <= 1e-9
        for number, value in enumerate(grad_sum.values()):
            value.fill_(number)  # in place, as noise may be added
        assert [float(value.mean()) for value in grad_sum.values()] == [0.0, 1.0, 2.0]


def drawn_noise(draw):
    """Fills memory that it asked for with numbers of its own, as code on GitHub does."""
    return Do(lambda rows: rows + 0.1 * draw(torch.empty_like(rows)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torchvision.ops.StochasticDepth(0.5, "row"),
        lambda: timm.layers.DropPath(0.5),
        lambda: drawn_noise(lambda empty: empty.bernoulli_(0.7)),
        lambda: drawn_noise(lambda empty: empty.normal_()),
        lambda: drawn_noise(lambda empty: empty.exponential_()),
        lambda: drawn_noise(lambda empty: empty.uniform_()),
    ],
)
def test_memory_that_is_filled_with_draws_keeps_the_fast_engine(make):
    torch.manual_seed(0)
    block = Made(lambda self, rows: rows + self.drop(self.branch(rows)), branch=nn.Linear(16, 16), drop=make())
    model = nn.Sequential(block, nn.Linear(16, 3))
    rows, targets, key, ids = torch.randn(6, 16), torch.randint(3, (6,)), bytes(32), torch.arange(6)
    grad_fn = clipped_grad(model, cross_entropy, clipping_norm=0.1)
    whole = grad_fn(rows, targets, key=key, example_ids=ids).grad_sum
    assert grad_fn.engine == "graph", grad_fn.refusal
    slow = clipped_grad(model, cross_entropy, clipping_norm=0.1, engine="reference")
    assert distance(whole, slow(rows, targets, key=key, example_ids=ids).grad_sum) < 1e-5
    others = grad_fn(rows[1:], targets[1:], key=key, example_ids=ids[1:]).grad_sum
    assert distance(whole, others) <= 1.001 * grad_fn.sensitivity
