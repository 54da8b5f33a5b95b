"""What mixes examples is found by what it does, in every disguise, and what does not is let through."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sfumato.clipping import clipped_grad, findings, fix_groupnorm, require_private
from sfumato.errors import InputError

IMAGE = torch.zeros(1, 3, 8, 8)


class Net(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.body(x).mean(dim=(2, 3)))


class BatchNormAct(nn.BatchNorm2d):
    """As in timm: a subclass that applies its own activation."""

    def __init__(self, channels):
        super().__init__(channels)
        self.drop = nn.Identity()
        self.act = nn.SiLU()

    def forward(self, x):
        return self.act(self.drop(super().forward(x)))


class HandWrittenNorm(nn.Module):
    def forward(self, x):
        return (x - x.mean(dim=(0, 2, 3), keepdim=True)) / x.std()


class FrozenAffine(nn.BatchNorm2d):
    def __init__(self, channels):
        super().__init__(channels)
        self.weight.requires_grad_(False)
        self.bias.requires_grad_(False)


class FunctionalBatchNorm(nn.Module):
    def forward(self, x):
        return F.batch_norm(x, None, None, training=True)


class MixesNeighbours(nn.Module):
    def forward(self, x):
        return x + 0.1 * x.roll(1, dims=0)


class MovesRows(nn.Module):
    def forward(self, x):
        return x.flip(0)


class StatisticsThenUse(nn.Module):
    """Updates running statistics a little, then normalises by those."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        self.mean = 0.999 * self.mean + 0.001 * x.detach().mean(dim=(0, 2, 3))
        return x - self.mean[:, None, None]


class Remembers(nn.Module):
    """Carries one batch over to the next, outside of any buffer."""

    last = 0.0

    def forward(self, x):
        out = x + self.last
        self.last = x.detach().mean()
        return out


class HiddenBehindZero(nn.Module):
    """A residual branch that starts at zero, as ReZero and SkipInit do."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(8, track_running_stats=False)
        self.gain = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return x + self.gain * self.norm(x)


MIXING = [
    nn.BatchNorm2d(8),
    nn.BatchNorm2d(8, affine=False),
    nn.BatchNorm2d(8, track_running_stats=False),
    nn.BatchNorm2d(8, momentum=None),
    nn.BatchNorm2d(8).eval(),  # model.train() would wake it
    FrozenAffine(8),
    BatchNormAct(8),
    HandWrittenNorm(),
    FunctionalBatchNorm(),
    MixesNeighbours(),
    MovesRows(),
    StatisticsThenUse(),
    nn.InstanceNorm2d(8, track_running_stats=True),
]


@pytest.mark.parametrize("layer", MIXING, ids=lambda layer: type(layer).__name__)
def test_what_mixes_examples_is_found_and_named(layer):
    found = findings(Net(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), layer, nn.ReLU())), IMAGE)
    assert [(finding.path, finding.kind) for finding in found] == [("body.1", type(layer).__name__)]


def test_state_carried_from_batch_to_batch_is_found():
    assert findings(Net(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), Remembers())), IMAGE)


def test_a_mixing_layer_hidden_behind_a_zero_gain_is_found():
    (finding,) = findings(Net(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), HiddenBehindZero())), IMAGE)
    assert finding.path == "body.1.norm"


class MixesItself(Net):
    def forward(self, x):
        return super().forward(x - x.mean(0))


def test_an_operation_in_the_models_own_forward_is_blamed_on_the_model():
    (finding,) = findings(MixesItself(nn.Conv2d(3, 8, 3)), IMAGE)
    assert finding.path == "" and str(finding).startswith("the model (MixesItself) mixes examples")


def test_every_guilty_layer_is_listed_once():
    shared = nn.BatchNorm2d(8)
    body = nn.Sequential(
        nn.Conv2d(3, 8, 3), shared, nn.Conv2d(8, 8, 3), shared, nn.BatchNorm2d(8, track_running_stats=False)
    )
    assert [finding.path for finding in findings(Net(body), IMAGE)] == ["body.1", "body.4"]


class FrozenBatchNorm(nn.BatchNorm2d):
    def train(self, mode=True):
        return super().train(False)


CLEAN = [
    nn.Identity(),
    nn.GroupNorm(4, 8),
    nn.InstanceNorm2d(8),
    nn.InstanceNorm2d(8, affine=True),
    nn.LayerNorm([8, 8, 8]),
    nn.LocalResponseNorm(3),
    nn.Dropout(0.5),
    nn.Dropout2d(0.5),
    nn.AlphaDropout(0.5),
    nn.PReLU(),
    nn.ReLU(inplace=True),
    FrozenBatchNorm(8).requires_grad_(False),
]


@pytest.mark.parametrize("layer", CLEAN, ids=lambda layer: type(layer).__name__)
def test_what_keeps_examples_apart_passes(layer):
    assert findings(Net(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), layer)), IMAGE) == []


class Attention(nn.Module):
    """Tokens first, rows second, as torchvision's transformers once were."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Conv2d(3, 8, 2, stride=2)
        self.attention = nn.MultiheadAttention(8, 2)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        tokens = self.embed(x).flatten(2).permute(2, 0, 1)  # (16, rows, 8)
        return self.head(self.attention(tokens, tokens, tokens)[0].mean(0))


def test_attention_over_an_images_own_tokens_passes():
    assert findings(Attention(), IMAGE) == []


def test_outputs_may_be_several_tensors():
    class TwoHeads(Net):
        def forward(self, x):
            return {"logits": super().forward(x), "map": self.body(x)}

    assert findings(TwoHeads(nn.Conv2d(3, 8, 3)), IMAGE) == []
    assert findings(TwoHeads(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))), IMAGE)


def test_the_error_names_object_reason_and_remedy():
    model = nn.Sequential()
    model.add_module("layer1", nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
    with pytest.raises(InputError) as caught:
        require_private(model, IMAGE)
    assert str(caught.value) == (
        "BatchNorm2d at 'layer1.1' mixes examples, so per-example gradients do not exist and no privacy guarantee "
        "holds. "
        "Replace it: --set model.fix=groupnorm, in code fix_groupnorm(model)."
    )


def test_running_statistics_that_are_kept_but_not_used_are_found():
    class Watches(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.seen += x.detach().mean()
            return x

    (finding,) = findings(Net(nn.Sequential(nn.Conv2d(3, 8, 3), Watches())), IMAGE)
    assert finding.path == "body.1" and "changes its buffer 'seen'" in finding.reason


def test_parameters_that_never_train_are_found():
    model = Net(nn.Conv2d(3, 8, 3))
    model.spare = nn.Linear(2, 2)
    assert [(finding.path, finding.kind) for finding in findings(model, IMAGE)] == [("spare", "Linear")] * 2
    model.spare.requires_grad_(False)
    assert findings(model, IMAGE) == []
    assert "no trainable parameter" in str(findings(model.requires_grad_(False), IMAGE)[0])


class OfComplexNumbers(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight, self.rest = nn.Parameter(weight), nn.Linear(3, 2)

    def forward(self, rows):
        weight = self.weight if self.weight.is_complex() else torch.view_as_complex(self.weight)
        return self.rest((rows.to(weight.dtype) @ weight).abs())


@pytest.mark.parametrize("engine", ["reference", "func", "graph", "auto"])
def test_complex_parameters_are_refused_and_their_real_form_is_taken(engine):
    rows, labels = torch.randn(5, 4), torch.tensor([0, 1, 0, 1, 1])

    def sums(weight, engine):
        torch.manual_seed(0)
        loss = partial(F.cross_entropy, reduction="none")
        return clipped_grad(OfComplexNumbers(weight), loss, clipping_norm=1.0, engine=engine)(rows, labels)

    weight = torch.randn(4, 3, dtype=torch.complex64)
    with pytest.raises(InputError, match="complex trainable parameter 'weight'"):
        sums(weight, engine)
    weight = torch.view_as_real(weight).clone()
    if engine == "graph":
        with pytest.raises(
            InputError, match="gives complex numbers"
        ):  # exact as it might be, no rule has been tried on them
            sums(weight, engine)
        return
    found, true = sums(weight, engine), sums(weight, "reference")
    torch.testing.assert_close(found.grad_norms, true.grad_norms, rtol=1e-5, atol=0)
    torch.testing.assert_close(found.grad_sum["weight"], true.grad_sum["weight"], rtol=1e-4, atol=1e-6)


def test_checking_leaves_model_and_random_state_as_they_were():
    model = Net(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout())).eval()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert findings(model, IMAGE)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not model.training and not model.body[1].training and torch.equal(state, torch.get_rng_state())
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    "layer", [nn.BatchNorm2d(8), nn.BatchNorm2d(8, affine=False), FrozenAffine(8), BatchNormAct(8), nn.SyncBatchNorm(8)]
)
def test_a_fixed_model_passes(layer):
    model = Net(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), layer, nn.ReLU()))
    assert fix_groupnorm(model) is model
    assert findings(model, IMAGE) == []


def test_the_fix_keeps_the_affine_weights_and_what_is_frozen():
    norm = nn.BatchNorm2d(24, eps=1e-3)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    norm.weight.requires_grad_(False)
    (fixed,) = fix_groupnorm(nn.Sequential(norm))
    assert torch.equal(fixed.weight, norm.weight) and torch.equal(fixed.bias, norm.bias)
    assert not fixed.weight.requires_grad and fixed.bias.requires_grad and fixed.eps == 1e-3
    x = torch.randn(2, 24, 5, 5)
    torch.testing.assert_close(fixed(x), F.group_norm(x, 12, norm.weight, norm.bias, 1e-3))
    assert fix_groupnorm(nn.BatchNorm2d(4, affine=False)).weight is None


@pytest.mark.parametrize(
    ("channels", "groups"),
    [(64, 16), (32, 16), (24, 12), (16, 8), (18, 9), (17, 1), (34, 2), (3, 1), (2, 1), (1, 1)],
)
def test_groups_are_as_many_as_divide_the_channels_up_to_sixteen_and_leave_two_to_each(channels, groups):
    assert fix_groupnorm(nn.BatchNorm2d(channels)).num_groups == groups


def test_no_feature_is_normalised_alone():
    fixed = fix_groupnorm(nn.BatchNorm1d(16))
    assert fixed.num_groups == 8 and fixed(torch.randn(3, 16)).abs().max() > 0.1
    for channels in range(2, 70):  # maps of one pixel
        fixed = fix_groupnorm(nn.BatchNorm2d(channels))
        assert fixed(torch.randn(3, channels, 1, 1)).abs().amax((1, 2, 3)).min() > 0.1


def test_a_layer_used_twice_stays_one_layer_and_an_activation_inside_is_kept():
    shared = nn.BatchNorm2d(8)
    fixed = fix_groupnorm(nn.Sequential(shared, nn.ReLU(), shared, BatchNormAct(8)))
    assert fixed[0] is fixed[2] and isinstance(fixed[0], nn.GroupNorm)
    x = torch.randn(2, 8, 4, 4)
    torch.testing.assert_close(fixed[3](x), F.silu(F.group_norm(x, 4)))


class StochasticDepth(nn.Module):
    def __init__(self, rate, by):
        super().__init__()
        self.rate, self.by = rate, by

    def forward(self, x):
        if self.by == "dropout":
            return nn.functional.dropout(x, self.rate)
        if self.by == "bernoulli":
            return x * x.new_empty(len(x), 1).bernoulli_(1 - self.rate)
        return x * (1 - self.rate + torch.rand(len(x), 1)).floor()


class MixingBehind(nn.Module):
    """Mixes rows in a branch that is mostly dropped; `draws` shifts what random numbers it meets."""

    def __init__(self, drop, draws):
        super().__init__()
        self.a, self.b, self.drop, self.draws = nn.Linear(4, 4), nn.Linear(4, 2), drop, draws

    def forward(self, x):
        torch.rand(self.draws)
        h = self.a(x)
        return self.b(h + self.drop(h - h.mean(0)))


@pytest.mark.parametrize("by", ["dropout", "bernoulli", "rand"])
def test_mixing_behind_stochastic_depth_is_seen(by):
    for draws in range(12):
        found = findings(MixingBehind(StochasticDepth(0.99, by), draws), torch.zeros(4, 4))
        assert any("mixes examples" in finding.reason for finding in found)


def test_stochastic_depth_alone_mixes_nothing():
    model = nn.Sequential(nn.Linear(4, 4), StochasticDepth(0.5, "bernoulli"), nn.Dropout(0.5), nn.Linear(4, 2))
    assert findings(model, torch.zeros(4, 4)) == []


@torch.library.custom_op("sfumato_tests::no_derivative", mutates_args=())
def no_derivative(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


@no_derivative.register_fake
def _(x):
    return torch.empty_like(x)


class Underivable(nn.Module):
    def __init__(self, operation):
        super().__init__()
        self.before, self.after, self.operation = nn.Linear(3, 3), nn.Linear(3, 2), operation

    def forward(self, x):
        return self.after(self.operation(self.before(x)))


class Applied(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def opaque(x):
    return no_derivative(x)


def gamma(x):
    return torch.special.gammainc(x.abs() + 0.5, x.new_ones(()))


@pytest.mark.parametrize("function, operation", [(opaque, "sfumato_tests.no_derivative"), (gamma, "igamma")])
def test_an_operation_without_a_derivative_is_named_with_its_module(function, operation):
    for model, path in [
        (nn.Sequential(nn.Linear(4, 3), Underivable(Applied(function))), "1.operation"),
        (nn.Sequential(nn.Linear(4, 3), Underivable(function)), "1"),
    ]:
        (finding,) = findings(model, torch.zeros(1, 4))
        assert finding.path == path
        assert operation in finding.reason
        for engine in ("auto", "graph", "func", "reference"):
            with pytest.raises(InputError, match=operation):
                clipped_grad(model, lambda outputs: outputs.sum(1), clipping_norm=1.0, engine=engine)(torch.randn(2, 4))


def test_an_operation_without_a_derivative_before_all_that_is_trained_is_taken():
    model = nn.Sequential(Applied(gamma), Applied(opaque), nn.Linear(4, 2))
    assert findings(model, torch.zeros(1, 4)) == []


class BNReLU(nn.BatchNorm2d):
    """As older code writes it: nothing in the list of modules tells of the ReLU."""

    def forward(self, values):
        return nn.functional.relu(super().forward(values))


class BNThenAct(nn.BatchNorm2d):
    def __init__(self, channels):
        super().__init__(channels)
        self.act = nn.ReLU()

    def forward(self, values):
        return self.act(super().forward(values))


def test_a_batch_norm_that_does_more_than_its_submodules_is_not_replaced_silently():
    with pytest.raises(InputError, match="BNReLU does more than normalise"):
        fix_groupnorm(nn.Sequential(nn.Conv2d(3, 8, 3), BNReLU(8)))
    fixed = fix_groupnorm(nn.Sequential(BNThenAct(8)))
    assert fixed(torch.randn(2, 8, 4, 4)).min() == 0
    with pytest.raises(InputError, match="LazyBatchNorm2d gets its shape from the first images"):
        fix_groupnorm(nn.Sequential(nn.Conv2d(3, 8, 3), nn.LazyBatchNorm2d()))
