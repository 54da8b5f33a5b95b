"""The laws of a sum of clipped per-example gradients, for every engine."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from sfumato.clipping import clipped_grad, pure
from sfumato.clipping.func import FuncEngine
from sfumato.clipping.preparation import BUILDERS
from sfumato.clipping.protocol import Batch
from sfumato.clipping.speed import Speed
from sfumato.errors import InputError
from sfumato.models.layers import WeightStandardizedConv2d
from tests.clipping.problems import FIXED, cross_entropy

ENGINES = ["reference", "func", "graph"]
laws = settings(deadline=None, max_examples=12)


def conv_model(width):
    return nn.Sequential(
        nn.Conv2d(1, width, 3, stride=2), nn.GroupNorm(1, width), nn.Tanh(), nn.Flatten(), nn.Linear(4 * width, 3)
    )


def linear_model(width):
    return nn.Sequential(nn.Flatten(), nn.Linear(36, width), nn.SiLU(), nn.Linear(width, 3))


def standardized_model(width):
    return nn.Sequential(
        WeightStandardizedConv2d(1, width, 3, stride=3), nn.SiLU(), nn.Flatten(), nn.Linear(4 * width, 3)
    )


MODELS = [conv_model, linear_model, standardized_model]


def make_problem(factory=conv_model, num_examples=5, augmult=0, dtype=torch.float64, seed=0, width=4):
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = factory(width).to(dtype)
    views = (augmult,) if augmult else ()
    inputs = 3 * torch.randn(num_examples, *views, 1, 6, 6, generator=generator, dtype=dtype)
    targets = torch.randint(3, (num_examples,), generator=generator)
    return model, inputs, targets


def l2_distance(a, b):
    return torch.stack([(a[name].double() - b[name].double()).square().sum() for name in a]).sum().sqrt().item()


def l2_norm(a):
    return l2_distance(a, {name: torch.zeros_like(value) for name, value in a.items()})


def autograd_of_example(model, inputs, targets, i):
    """The gradient of one example's loss, mean over its views, with no engine involved."""
    rows = inputs[i] if inputs.ndim == 5 else inputs[i : i + 1]
    loss = F.cross_entropy(model(rows), targets[i].expand(len(rows)))
    return dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, list(model.parameters())), strict=True))


problems = {
    "engine": st.sampled_from(ENGINES),
    "factory": st.sampled_from(MODELS),
    "num_examples": st.integers(1, 9),
    "microbatch_size": st.sampled_from([1, 2, 4, 5, 7, 30]),
    "augmult": st.sampled_from([0, 1, 3]),
    "rescale": st.booleans(),
    "seed": st.integers(0, 2**31),
}


@laws
@given(clipping_norm=st.sampled_from([1e-3, 0.3, 1.0, 50.0]), **problems)
def test_removing_one_example_moves_the_sum_by_at_most_the_sensitivity(
    engine, factory, num_examples, microbatch_size, augmult, rescale, seed, clipping_norm
):
    model, x, y = make_problem(factory, num_examples, augmult, torch.float32, seed)
    grad_fn = clipped_grad(
        model,
        cross_entropy,
        clipping_norm=clipping_norm,
        augmult=augmult,
        rescale_to_unit_norm=rescale,
        microbatch_size=microbatch_size,
        engine=engine,
    )
    full = grad_fn(x, y)
    for i in range(num_examples):
        keep = torch.arange(num_examples) != i
        moved = l2_distance(full.grad_sum, grad_fn(x[keep], y[keep]).grad_sum)
        assert moved <= grad_fn.sensitivity * (1 + 1e-5)
        # The bound is met wherever the gradient was clipped: a zero output would pass the bound alone.
        expected = grad_fn.sensitivity * min(1, full.grad_norms[i].item() / clipping_norm)
        assert moved == pytest.approx(expected, rel=1e-3, abs=1e-5 * grad_fn.sensitivity * num_examples)


@laws
@given(**problems)
def test_when_nothing_is_clipped_the_sum_is_the_gradient_of_the_summed_loss(
    engine, factory, num_examples, microbatch_size, augmult, rescale, seed
):
    model, x, y = make_problem(factory, num_examples, augmult, seed=seed)
    clipping_norm = 1e6
    grad_fn = clipped_grad(
        model,
        cross_entropy,
        clipping_norm=clipping_norm,
        augmult=augmult,
        rescale_to_unit_norm=rescale,
        microbatch_size=microbatch_size,
        engine=engine,
    )
    out = grad_fn(x, y)
    rows = x.flatten(0, 1) if augmult else x
    losses = cross_entropy(model(rows), y.repeat_interleave(max(1, augmult))).reshape(num_examples, -1).mean(dim=1)
    expected = torch.autograd.grad(losses.sum(), list(model.parameters()))
    for (name, value), gradient in zip(out.grad_sum.items(), expected, strict=True):
        torch.testing.assert_close(value * (clipping_norm if rescale else 1), gradient, rtol=1e-9, atol=1e-9, msg=name)
    torch.testing.assert_close(out.losses, losses.detach(), rtol=1e-9, atol=1e-9)


@laws
@given(clipping_norm=st.sampled_from([0.1, 1.0, 3.0]), **problems)
def test_the_sum_is_that_of_algorithm_1_written_out(
    engine, factory, num_examples, microbatch_size, augmult, rescale, seed, clipping_norm
):
    model, x, y = make_problem(factory, num_examples, augmult, seed=seed)
    grad_fn = clipped_grad(
        model,
        cross_entropy,
        clipping_norm=clipping_norm,
        augmult=augmult,
        rescale_to_unit_norm=rescale,
        microbatch_size=microbatch_size,
        engine=engine,
    )
    out = grad_fn(x, y)
    expected = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    for i in range(num_examples):
        gradient = autograd_of_example(model, x, y, i)  # views averaged first
        norm = l2_norm(gradient)
        assert out.grad_norms[i].item() == pytest.approx(norm, rel=1e-9)
        clipped = min(1, clipping_norm / norm) / (clipping_norm if rescale else 1)
        for name, value in gradient.items():
            expected[name] += clipped * value
    assert l2_distance(out.grad_sum, expected) <= 1e-9 * (1 + l2_norm(expected))


@laws
@given(**{name: strategy for name, strategy in problems.items() if name != "engine"})
def test_the_engines_agree(factory, num_examples, microbatch_size, augmult, rescale, seed):
    model, x, y = make_problem(factory, num_examples, augmult, seed=seed)
    outs = [
        clipped_grad(
            model,
            cross_entropy,
            clipping_norm=1.0,
            augmult=augmult,
            rescale_to_unit_norm=rescale,
            microbatch_size=microbatch_size,
            engine=engine,
        )(x, y)
        for engine in ENGINES
    ]
    for out in outs[1:]:
        assert l2_distance(outs[0].grad_sum, out.grad_sum) < 1e-9
        torch.testing.assert_close(outs[0].grad_norms, out.grad_norms, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(outs[0].losses, out.losses, rtol=1e-9, atol=1e-12)


@laws
@given(other=st.sampled_from([1, 3, 8, 9, 20]), **problems)
def test_the_microbatch_size_changes_nothing(
    engine, factory, num_examples, microbatch_size, augmult, rescale, seed, other
):
    model, x, y = make_problem(factory, num_examples, augmult, seed=seed)
    kwargs = dict(clipping_norm=1.0, augmult=augmult, rescale_to_unit_norm=rescale, engine=engine)
    one, two = (
        clipped_grad(model, cross_entropy, microbatch_size=size, **kwargs)(x, y) for size in (microbatch_size, other)
    )
    assert l2_distance(one.grad_sum, two.grad_sum) < 1e-11
    torch.testing.assert_close(one.grad_norms, two.grad_norms, rtol=1e-11, atol=1e-12)


@laws
@given(mask=st.lists(st.booleans(), min_size=9, max_size=9), **problems)
def test_padding_contributes_exactly_zero_whatever_it_holds(
    engine, factory, num_examples, microbatch_size, augmult, rescale, seed, mask
):
    model, x, y = make_problem(factory, num_examples, augmult, torch.float32, seed)
    is_padding = torch.tensor(mask[:num_examples])
    x[is_padding] = torch.nan
    y[is_padding] = -100
    grad_fn = clipped_grad(
        model,
        cross_entropy,
        clipping_norm=1.0,
        augmult=augmult,
        rescale_to_unit_norm=rescale,
        microbatch_size=microbatch_size,
        engine=engine,
    )
    out, alone = grad_fn(x, y, is_padding=is_padding), grad_fn(x[~is_padding], y[~is_padding])
    for name, value in alone.grad_sum.items():
        assert torch.equal(out.grad_sum[name], value)
    assert torch.equal(out.grad_norms[~is_padding], alone.grad_norms) and not out.grad_norms[is_padding].any()
    assert torch.equal(out.losses[~is_padding], alone.losses) and not out.losses[is_padding].any()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("augmult", [0, 2])
def test_an_example_that_is_not_finite_contributes_exactly_zero(engine, value, augmult):
    model, x, y = make_problem(num_examples=7, augmult=augmult, dtype=torch.float32)
    grad_fn = clipped_grad(model, cross_entropy, clipping_norm=1.0, augmult=augmult, microbatch_size=3, engine=engine)
    broken = x.clone()
    broken[4].view(-1)[0] = value
    is_padding = torch.arange(7) == 4
    expected, out = grad_fn(x, y, is_padding=is_padding).grad_sum, grad_fn(broken, y).grad_sum
    assert l2_norm(out) > 0.1
    assert l2_distance(out, expected) < 1e-6


@pytest.mark.parametrize("engine", ENGINES)
def test_an_infinite_loss_with_a_finite_gradient_contributes_exactly_zero(engine):
    model = nn.Linear(2, 1, bias=False)
    grad_fn = clipped_grad(model, lambda outputs, offsets: outputs[:, 0] + offsets, clipping_norm=1.0, engine=engine)
    out = grad_fn(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), torch.tensor([torch.inf, 0.0]))
    torch.testing.assert_close(out.grad_sum["weight"], torch.tensor([[0.3, 0.4]]))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_gradient_whose_square_overflows_contributes_zero(engine):
    model = nn.Linear(2, 1, bias=False)
    grad_fn = clipped_grad(model, lambda outputs: outputs[:, 0], clipping_norm=1.0, engine=engine)
    out = grad_fn(torch.tensor([[3e38, 3e38], [0.3, 0.4]]))
    torch.testing.assert_close(out.grad_sum["weight"], torch.tensor([[0.3, 0.4]]))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("rescale", [False, True])
def test_a_gradient_of_zero_stays_zero(engine, rescale):
    model = nn.Linear(2, 1, bias=False)
    grad_fn = clipped_grad(
        model, lambda outputs: outputs[:, 0], clipping_norm=1.0, rescale_to_unit_norm=rescale, engine=engine
    )
    out = grad_fn(torch.zeros(3, 2))
    assert torch.equal(out.grad_sum["weight"], torch.zeros(1, 2))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("augmult", [0, 2])
def test_an_empty_batch_sums_to_zero(engine, augmult):
    model, x, y = make_problem(augmult=augmult, dtype=torch.float32)
    out = clipped_grad(model, cross_entropy, clipping_norm=1.0, augmult=augmult, engine=engine)(x[:0], y[:0])
    assert {name: value.shape for name, value in out.grad_sum.items()} == {
        name: value.shape for name, value in model.named_parameters()
    }
    assert l2_norm(out.grad_sum) == 0 and out.grad_norms.shape == out.losses.shape == (0,)
    all_padding = clipped_grad(model, cross_entropy, clipping_norm=1.0, augmult=augmult, engine=engine)(
        x, y, is_padding=torch.ones(5).bool()
    )
    assert l2_norm(all_padding.grad_sum) == 0 and not all_padding.grad_norms.any()


@pytest.mark.parametrize("engine", ENGINES)
def test_views_are_averaged_before_clipping(engine):
    model = nn.Linear(2, 1, bias=False)
    keys = {"clipping_norm": 1.0, "augmult": 2, "methods": FIXED}  # a ghost norm adds what roundings could hide
    grad_fn = clipped_grad(model, lambda outputs: outputs[:, 0], engine=engine, **keys)
    # Two long opposite views with a short mean: clipping each first would give (0, 0).
    out = grad_fn(torch.tensor([[[30.0, 40.0], [-29.4, -39.2]]]))
    torch.testing.assert_close(out.grad_sum["weight"], torch.tensor([[0.3, 0.4]]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out.grad_norms, torch.tensor([0.5]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_sensitivity_is_one_after_rescaling_and_the_clipping_norm_without(engine):
    model, x, y = make_problem()
    for rescale, sensitivity in ((True, 1.0), (False, 0.25)):
        grad_fn = clipped_grad(model, cross_entropy, clipping_norm=0.25, rescale_to_unit_norm=rescale, engine=engine)
        assert grad_fn.sensitivity == sensitivity
        assert l2_norm(grad_fn(x[:1], y[:1]).grad_sum) == pytest.approx(
            sensitivity, rel=1e-6
        )  # clipped: the bound is met


@pytest.mark.parametrize("engine", ENGINES)
def test_sums_are_float32_for_bfloat16_parameters(engine):
    model, x, y = make_problem(dtype=torch.bfloat16)
    grad_fn = clipped_grad(model, cross_entropy, clipping_norm=0.1, engine=engine)
    for i in range(len(x)):
        out = grad_fn(x[i : i + 1], y[i : i + 1])
        assert all(value.dtype == torch.float32 for value in out.grad_sum.values())
        assert l2_norm(out.grad_sum) <= 1 + 1e-5


class Stateful(nn.Module):
    """Counts its calls in a buffer: harmless for privacy, but state all the same."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(36, 3)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x):
        return self.layer(x.flatten(1)) * self.scale


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("grad_mode", [True, False])
def test_the_model_is_left_as_it_was(engine, grad_mode):
    _, x, y = make_problem(dtype=torch.float32)
    model = nn.Sequential(Stateful(), nn.Dropout(0.5)).train()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.set_grad_enabled(grad_mode):
        out = clipped_grad(model, cross_entropy, clipping_norm=1.0, engine=engine)(
            x, y, key=bytes(32), example_ids=torch.arange(len(x))
        )
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(
        torch.equal(parameter.grad, torch.full_like(parameter, 7.0)) and parameter.requires_grad
        for parameter in model.parameters()
    )
    assert (
        model.training
        and not any(value.requires_grad for value in out.grad_sum.values())
        and not out.losses.requires_grad
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_frozen_parameters_are_left_out(engine):
    model, x, y = make_problem()
    full = clipped_grad(model, cross_entropy, clipping_norm=1e6, rescale_to_unit_norm=False, engine=engine)(
        x, y
    ).grad_sum
    model[0].requires_grad_(False)
    out = clipped_grad(model, cross_entropy, clipping_norm=1e6, rescale_to_unit_norm=False, engine=engine)(
        x, y
    ).grad_sum
    assert set(out) == {"1.weight", "1.bias", "4.weight", "4.bias"}
    for name, value in out.items():
        torch.testing.assert_close(value, full[name])


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(36, 36)
        self.second = nn.Linear(36, 36)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(x.flatten(1))))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_tied_parameter_counts_once_with_both_its_uses(engine):
    _, x, y = make_problem()
    model = Tied().double()
    out = clipped_grad(model, cross_entropy, clipping_norm=1e6, rescale_to_unit_norm=False, engine=engine)(x, y)
    expected = torch.autograd.grad(cross_entropy(model(x), y).sum(), list(model.parameters()))
    assert list(out.grad_sum) == ["first.weight", "first.bias", "second.bias"]
    for value, gradient in zip(out.grad_sum.values(), expected, strict=True):
        torch.testing.assert_close(value, gradient, rtol=1e-9, atol=1e-9)


class Detached(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = nn.Linear(36, 3)
        self.cut = nn.Linear(36, 3)

    def forward(self, x):
        return self.used(x.flatten(1)) + self.cut(x.flatten(1)).detach()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_trainable_parameter_without_a_gradient_is_refused_by_name(engine):
    _, x, y = make_problem(dtype=torch.float32)
    with pytest.raises(InputError, match="parameter 'cut.weight' receives no gradient"):
        clipped_grad(Detached(), cross_entropy, clipping_norm=1.0, engine=engine)(x, y)
    two_heads = nn.Linear(36, 4)
    heads = nn.ModuleDict({"a": two_heads, "b": nn.Linear(36, 4)})

    class TwoHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = heads

        def forward(self, x):
            return [head(x.flatten(1)) for head in self.heads.values()]

    with pytest.raises(InputError, match="'heads.b.weight' receives no gradient from the loss"):
        clipped_grad(TwoHeads(), lambda outputs, y: cross_entropy(outputs[0], y), clipping_norm=1.0, engine=engine)(
            x, y
        )


@pytest.mark.parametrize("engine", ENGINES)
def test_a_model_that_mixes_examples_is_refused_by_name(engine):
    _, x, y = make_problem(dtype=torch.float32)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 3))
    with pytest.raises(InputError, match="BatchNorm2d at '1' mixes examples"):
        clipped_grad(model, cross_entropy, clipping_norm=1.0, engine=engine)(x, y)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"clipping_norm": 0.0}, "clipping_norm must be finite and at least 1e-12"),
        ({"clipping_norm": float("inf")}, "clipping_norm must be finite and at least 1e-12"),
        ({"clipping_norm": float("nan")}, "clipping_norm must be finite and at least 1e-12"),
        ({"clipping_norm": 1.0, "augmult": -1}, "augmult must be a whole number, at least 0"),
        ({"clipping_norm": 1.0, "microbatch_size": 0}, "microbatch_size must be a whole number, at least 1"),
        ({"clipping_norm": 1.0, "engine": "fast"}, "Known are auto, graph, func, reference"),
    ],
)
def test_wrong_arguments_are_refused_at_once(kwargs, message):
    with pytest.raises(InputError, match=message):
        clipped_grad(nn.Linear(2, 1), cross_entropy, **kwargs)


def centred(outputs, targets):
    return cross_entropy(outputs - outputs.mean(0), targets)


def weighted_by_all_targets(outputs, targets):
    return cross_entropy(outputs, targets) * (1 + targets.double().mean())


def divided_by_rows(outputs, targets):
    return cross_entropy(outputs, targets) / len(outputs)


def branching(outputs, targets):
    """Reads a value, as vmap cannot."""
    return cross_entropy(outputs, targets) * (2.0 if outputs.sum().item() > 0 else 1.0)


@pytest.mark.parametrize("augmult", [0, 3])
@pytest.mark.parametrize("loss_fn", [centred, weighted_by_all_targets, divided_by_rows, pure(branching)])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_loss_that_looks_at_other_rows_is_refused(engine, loss_fn, augmult):
    model, x, y = make_problem(augmult=augmult)
    with pytest.raises(InputError, match="loss_fn gives a row another loss beside other rows"):
        clipped_grad(model, loss_fn, clipping_norm=0.1, augmult=augmult, engine=engine)(x, y)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_loss_with_trainable_parameters_of_its_own_is_refused(engine):
    model, x, y = make_problem()
    temperature = nn.Parameter(torch.ones((), dtype=torch.float64))
    with pytest.raises(InputError, match="besides the model's output"):
        clipped_grad(
            model,
            lambda outputs, targets: cross_entropy(outputs * temperature, targets),
            clipping_norm=1.0,
            engine=engine,
        )(x, y)


@pytest.mark.parametrize("engine", ENGINES)
def test_wrong_shapes_are_refused(engine):
    model, x, y = make_problem()
    grad_fn = clipped_grad(model, cross_entropy, clipping_norm=1.0, engine=engine)
    with pytest.raises(InputError, match="one target for each example"):
        grad_fn(x, y[:2])
    with pytest.raises(InputError, match="is_padding"):
        grad_fn(x, y, is_padding=torch.zeros(5))
    with pytest.raises(InputError, match="augmult = 3 views"):
        clipped_grad(model, cross_entropy, clipping_norm=1.0, augmult=3, engine=engine)(x, y)
    with pytest.raises(InputError, match="one loss per row"):
        clipped_grad(model, F.cross_entropy, clipping_norm=1.0, engine=engine)(x, y)


@pytest.mark.parametrize("engine", ENGINES)
def test_no_microbatch_size_means_one_rule_that_shrinks_with_the_model(engine):
    model, x, y = make_problem(dtype=torch.float32)
    grad_fn = clipped_grad(model, cross_entropy, clipping_norm=1.0, engine=engine)
    assert grad_fn.microbatch_size is None
    grad_fn(x, y)
    assert grad_fn.microbatch_size == 32
    grad_fn.prepare(x, y, batch_size=4096)
    assert grad_fn.microbatch_size == 128
    large = nn.Sequential(nn.Flatten(), nn.Linear(36, 2**16), nn.Linear(2**16, 3))  # 2.6 million parameters
    grad_fn = clipped_grad(large, cross_entropy, clipping_norm=1.0, engine=engine)
    grad_fn(x[:1], y[:1])
    assert grad_fn.microbatch_size == 8


@pytest.mark.parametrize(("augmult", "views"), [(0, 1), (3, 3)])
def test_no_microbatch_size_means_one_that_shrinks_with_what_is_kept_for_the_backward_pass_too(augmult, views):
    """A tanh keeps its result: 44 of them with 100,000 values each beside 3,000 parameters."""
    model = nn.Sequential(nn.Linear(10, 300), *[nn.Tanh() for _ in range(44)])
    wide = nn.Sequential(nn.Unflatten(-1, (-1, 10)), model, nn.Flatten(), nn.LazyLinear(1))
    inputs = torch.randn(1, *([augmult] if augmult else []), 3330)
    wide(inputs.reshape(views, 3330))  # gives the lazy layer its shape
    grad_fn = clipped_grad(wide, lambda outputs: outputs.sum(1), clipping_norm=1.0, augmult=augmult, engine="func")
    grad_fn.prepare(inputs, batch_size=4096)
    kept = 44 * 333 * 300 * views
    assert grad_fn.microbatch_size == 2 ** int(math.log2(2**28 / kept))  # a gibibyte, in a power of two


@pytest.mark.parametrize(
    ("num_examples", "microbatch_size", "expected"),
    [
        (7, 3, [(3, 3), (3, 3), (3, 1)]),
        (35, 16, [(16, 16), (16, 16), (16, 3)]),
        (32, 32, [(32, 32)]),
        (1, 32, [(32, 1)]),
    ],
)
def test_only_the_last_microbatch_is_padded_and_no_example_is_dropped(
    monkeypatch, num_examples, microbatch_size, expected
):
    model, x, y = make_problem(num_examples=num_examples, dtype=torch.float32)
    seen = []

    class Spy(FuncEngine):
        def clipped_sum(self, coefficient, batch):
            assert len(batch.inputs) == len(batch.targets[0]) == len(batch.is_real)
            seen.append((len(batch.inputs), int(batch.is_real.sum())))
            return super().clipped_sum(coefficient, batch)

    monkeypatch.setitem(BUILDERS, "func", Spy)
    grad_fn = clipped_grad(model, cross_entropy, clipping_norm=1.0, microbatch_size=microbatch_size, engine="func")
    grad_fn(x, y)
    seen.clear()  # made-up images before the first batch
    grad_fn(x, y)
    assert seen == expected


class Counting(nn.Module):
    """Counts its calls in a buffer, in place."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(36, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.layer(x.flatten(1))


@pytest.mark.parametrize("engine", ENGINES)
def test_no_engine_writes_to_a_buffer_of_the_model(engine):
    _, x, y = make_problem(num_examples=4, dtype=torch.float32)
    model = Counting()
    try:
        BUILDERS[engine](model, cross_entropy, x[:1], Speed()).clipped_sum(
            torch.ones_like, Batch(x[:, None], (y,), torch.ones(4).bool(), None)
        )
    except RuntimeError as error:  # torch.func refuses by itself
        assert engine == "func" and "in-place operation" in str(error)
    except InputError as error:
        assert engine == "graph" and "changes its own buffers or parameters" in str(error)
    assert model.calls == 0


@pytest.mark.parametrize("engine", ENGINES)
def test_no_engine_counts_what_is_not_real(engine):
    model, x, y = make_problem(num_examples=4)
    is_real = torch.tensor([True, False, True, False])
    grad_sum = (
        BUILDERS[engine](model, cross_entropy, x[:1], Speed())
        .clipped_sum(torch.ones_like, Batch(x[:, None], (y,), is_real, None))
        .grad_sum
    )
    gradients = torch.autograd.grad(cross_entropy(model(x[is_real]), y[is_real]).sum(), list(model.parameters()))
    assert l2_distance(grad_sum, dict(zip(grad_sum, gradients, strict=True))) < 1e-9


@pytest.mark.parametrize("engine", ENGINES)
def test_sums_come_in_the_order_of_the_models_parameters(engine):
    """Noise is dealt out in that order, and a resumed run must deal it alike."""
    model, x, y = make_problem(num_examples=4)
    for rows in (4, 0):
        out = clipped_grad(model, cross_entropy, clipping_norm=1.0, engine=engine)(x[:rows], y[:rows])
        assert list(out.grad_sum) == [name for name, _ in model.named_parameters()]


def test_autocast_is_refused():
    model, x, y = make_problem(num_examples=4, dtype=torch.float32)
    grad_fn = clipped_grad(model, cross_entropy, clipping_norm=1.0)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(InputError, match='precision="bf16"'):
        grad_fn(x, y)
