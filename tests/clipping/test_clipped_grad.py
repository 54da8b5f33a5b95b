"""The laws of a sum of clipped per-example gradients, for every engine."""

import functools
import gc
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from sfumato.clipping import clipped_grad
from sfumato.clipping.prepared import BUILDERS
from sfumato.clipping.protocol import Batch, Speed
from sfumato.errors import InputError
from sfumato.models.layers import WeightStandardizedConv2d
from tests.clipping.problems import Made, clipped, cross_entropy, distance, gradients, norm

ENGINES = ["reference", "func", "graph"]
# What a network is made of is engine "graph"'s business; the others take all alike.
NETWORKS = [("reference", "conv"), ("func", "conv"), ("graph", "conv"), ("graph", "linear"), ("graph", "standardized")]


def model_of(name):
    torch.manual_seed(0)
    return {
        "conv": lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3, stride=2), nn.GroupNorm(1, 4), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)
        ),
        "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 4), nn.SiLU(), nn.Linear(4, 3)),
        "standardized": lambda: nn.Sequential(
            WeightStandardizedConv2d(1, 4, 3, stride=3), nn.SiLU(), nn.Flatten(), nn.Linear(16, 3)
        ),
    }[name]()


@functools.cache
def problem(name="conv", augmult=0, dtype=torch.float32, num_examples=7):
    generator = torch.Generator().manual_seed(1)
    views = (augmult,) if augmult else ()
    inputs = 3 * torch.randn(num_examples, *views, 1, 6, 6, generator=generator, dtype=torch.float64)
    return model_of(name).to(dtype), inputs.to(dtype), torch.randint(3, (num_examples,), generator=generator)


@functools.cache
def made(name, engine, augmult, dtype=torch.float32, clipping_norm=1.0, rescale=True):
    settings = {"clipping_norm": clipping_norm, "augmult": augmult, "rescale_to_unit_norm": rescale}
    model, *_ = problem(name, augmult, dtype)
    return clipped_grad(model, nn.CrossEntropyLoss(), microbatch_size=3, engine=engine, **settings)


@pytest.mark.parametrize(("augmult", "rescale"), [(0, True), (1, True), (3, False)])
@pytest.mark.parametrize(("engine", "name"), NETWORKS)
def test_the_sum_is_that_of_algorithm_1_written_out(engine, name, augmult, rescale):
    model, x, y = problem(name, augmult, torch.float64)
    out = made(name, engine, augmult, torch.float64, 0.7, rescale)(x, y)
    own = list(gradients(model, x, y, augmult))
    expected = clipped(own, 0.7, rescale)
    assert distance(out.grad_sum, expected) <= 1e-9 * (1 + norm(expected))
    assert out.grad_norms.tolist() == pytest.approx([norm(gradient) for gradient in own], rel=1e-9)
    rows = x.flatten(0, 1) if augmult else x
    losses = cross_entropy(model(rows), y.repeat_interleave(max(1, augmult))).view(len(x), -1).mean(1)
    torch.testing.assert_close(out.losses, losses.detach(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("augmult", "clipping_norm"), [(0, 50.0), (2, 0.3)])
@pytest.mark.parametrize(("engine", "name"), NETWORKS)
def test_removing_one_example_moves_the_sum_by_its_clipped_gradient(engine, name, augmult, clipping_norm):
    """So by at most the sensitivity; and by all of it wherever the gradient was clipped."""
    _, x, y = problem(name, augmult)
    grad_fn = made(name, engine, augmult, clipping_norm=clipping_norm)
    full = grad_fn(x, y)
    for i in range(0, len(x), 3):
        keep = torch.arange(len(x)) != i
        moved = distance(full.grad_sum, grad_fn(x[keep], y[keep]).grad_sum)
        assert moved <= grad_fn.sensitivity * (1 + 1e-5)
        expected = grad_fn.sensitivity * min(1, full.grad_norms[i].item() / clipping_norm)
        assert moved == pytest.approx(expected, rel=1e-3, abs=1e-4 * grad_fn.sensitivity)


@pytest.mark.parametrize("engine", ENGINES)
def test_padding_contributes_exactly_zero_whatever_it_holds(engine):
    _, x, y = problem("conv", 2)
    x, y, is_padding = x.clone(), y.clone(), torch.tensor([False, True, False, False, True, False, True])
    x[is_padding], y[is_padding] = torch.nan, -100
    grad_fn = made("conv", engine, 2)
    out, alone = grad_fn(x, y, is_padding=is_padding), grad_fn(x[~is_padding], y[~is_padding])
    assert all(torch.equal(out.grad_sum[name], value) for name, value in alone.grad_sum.items())
    assert torch.equal(out.grad_norms[~is_padding], alone.grad_norms) and not out.grad_norms[is_padding].any()
    assert torch.equal(out.losses[~is_padding], alone.losses) and not out.losses[is_padding].any()


@pytest.mark.parametrize(("augmult", "value"), [(0, torch.nan), (2, torch.inf)])
@pytest.mark.parametrize("engine", ENGINES)
def test_an_example_that_is_not_finite_contributes_exactly_zero(engine, augmult, value):
    _, x, y = problem("conv", augmult)
    broken, grad_fn = x.clone(), made("conv", engine, augmult)
    broken[4].view(-1)[0] = value
    expected, out = grad_fn(x, y, is_padding=torch.arange(7) == 4).grad_sum, grad_fn(broken, y).grad_sum
    assert norm(out) > 0.1 and distance(out, expected) < 1e-6


@pytest.mark.parametrize(
    ("wrong", "on_gpu"),
    [([4], False), ([*range(7)], False), ([0, 6], True), ([0, 1, 2], True), ([2, 3, 5], True), ([*range(7)], True)],
    ids=str,
)
def test_whatever_is_not_finite_is_left_out_and_nothing_is_loaded_again(wrong, on_gpu, monkeypatch):
    """On a GPU a microbatch is looked at while the next one is computed, and the last one is filled up."""
    model, x, y = problem("conv")
    grad_fn = clipped_grad(model, nn.CrossEntropyLoss(), clipping_norm=1.0, microbatch_size=3, workers=1)
    grad_fn.prepare(x, y)
    broken, loaded = x.clone(), []
    broken[wrong] = torch.nan
    left_out = torch.tensor([row in wrong for row in range(7)])
    expected = grad_fn(x, y, is_padding=left_out)
    monkeypatch.setattr(grad_fn._prepared, "on_gpu", on_gpu)

    def load(rows):
        loaded.append(rows.tolist())
        return broken[rows], y[rows]

    out = grad_fn.sum_over(load, torch.arange(7))
    assert distance(out.grad_sum, expected.grad_sum) < 1e-6  # a number
    assert loaded == ([[0, 1, 2], [3, 4, 5], [6, 6, 6]] if on_gpu else [[0, 1, 2], [3, 4], [5, 6]])
    assert torch.equal(out.grad_norms.isfinite(), ~left_out) and torch.equal(out.losses.isfinite(), ~left_out)
    torch.testing.assert_close(out.grad_norms[~left_out], expected.grad_norms[~left_out])


def linear(engine, loss=lambda outputs: outputs[:, 0], **settings):
    """Whose gradient is the image."""
    model = nn.Linear(2, 1, bias=False)
    settings = {"clipping_norm": 1.0, "methods": {"memory_format": "contiguous"}, "microbatch_size": 2} | settings
    return clipped_grad(model, loss, engine=engine, **settings)


@pytest.mark.parametrize("engine", ENGINES)
def test_what_float32_does_not_hold_contributes_zero(engine):
    grad_fn, expected = linear(engine), torch.tensor([[0.3, 0.4]])
    for long in (3e38, torch.inf):
        out = grad_fn(torch.tensor([[long, long], [0.3, 0.4]]))
        torch.testing.assert_close(out.grad_sum["weight"], expected)
    assert not grad_fn(torch.zeros(3, 2)).grad_sum["weight"].any()  # nor is a gradient of zero anything else
    offset = linear(engine, lambda outputs, offsets: outputs[:, 0] + offsets)
    out = offset(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), torch.tensor([torch.inf, 0.0]))
    torch.testing.assert_close(out.grad_sum["weight"], expected)


@pytest.mark.parametrize("engine", ENGINES)
def test_views_are_averaged_before_clipping(engine):
    # Two long opposite views with a short mean: clipping each first would give (0, 0).
    out = linear(engine, augmult=2)(torch.tensor([[[30.0, 40.0], [-29.4, -39.2]]]))
    torch.testing.assert_close(out.grad_sum["weight"], torch.tensor([[0.3, 0.4]]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out.grad_norms, torch.tensor([0.5]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_views_may_have_targets_and_weights_of_their_own(engine):
    """As a person's images do; a weight of zero leaves a view out, and no weight moves the sensitivity."""
    model, x, _ = problem("conv", 3, torch.float64)
    generator = torch.Generator().manual_seed(2)
    targets = torch.randint(3, x.shape[:2], generator=generator)
    weights = torch.rand(x.shape[:2], generator=generator, dtype=torch.float64) * torch.tensor([1.0, 9.0, 0.0])
    keys = {"clipping_norm": 0.7, "augmult": 3, "per_view": True, "engine": engine, "microbatch_size": 3}
    grad_fn = clipped_grad(model, nn.CrossEntropyLoss(), **keys)
    out = grad_fn(x, targets, weights)
    expected = clipped(gradients(model, x, targets, 3, weights), 0.7)
    assert distance(out.grad_sum, expected) <= 1e-9 * (1 + norm(expected))
    others = x.clone()
    others[:, 2] = 5.0
    assert distance(out.grad_sum, grad_fn(others, targets, weights).grad_sum) < 1e-12
    assert norm(grad_fn(x[:1], targets[:1], 1e6 * weights[:1]).grad_sum) == pytest.approx(1, rel=1e-6)
    loaded = grad_fn.sum_over(lambda rows: (x[rows], targets[rows], weights[rows]), torch.arange(7))
    assert distance(out.grad_sum, loaded.grad_sum) < 1e-12
    with pytest.raises(InputError, match="views' targets and weights"):
        grad_fn(x, targets[:, 0], weights)
    with pytest.raises(InputError, match="needs augmult"):
        clipped_grad(model, cross_entropy, clipping_norm=1.0, per_view=True)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_empty_batch_sums_to_zero_in_the_order_of_the_parameters(engine):
    model, x, y = problem("conv", 2)
    grad_fn = made("conv", engine, 2)
    for out in (grad_fn(x[:0], y[:0]), grad_fn(x, y, is_padding=torch.ones(7).bool()), grad_fn(x, y)):
        assert {name: value.shape for name, value in out.grad_sum.items()} == {
            name: value.shape for name, value in model.named_parameters()
        }
        assert list(out.grad_sum) == [name for name, _ in model.named_parameters()]
        assert bool(norm(out.grad_sum)) == bool(out.grad_norms.any())


@pytest.mark.parametrize("engine", ENGINES)
def test_sums_are_float32_for_bfloat16_parameters(engine):
    model, x, y = problem("linear", 0, torch.bfloat16)
    grad_fn = made("linear", engine, 0, torch.bfloat16, 0.1)
    for i in range(3):
        out = grad_fn(x[i : i + 1], y[i : i + 1])
        assert all(value.dtype == torch.float32 for value in out.grad_sum.values())
        assert norm(out.grad_sum) <= 1 + 1e-4


@pytest.mark.parametrize("engine", ENGINES)
def test_the_model_is_left_as_it_was(engine):
    _, x, y = problem()
    model = nn.Sequential(model_of("conv"), nn.Dropout(0.5)).train()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    before, state = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    with torch.no_grad():
        grad_fn = clipped_grad(model, cross_entropy, clipping_norm=1.0, engine=engine)
        out = grad_fn(x, y, key=bytes(32), example_ids=torch.arange(7))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all((parameter.grad == 7.0).all() and parameter.requires_grad for parameter in model.parameters())
    assert model.training and torch.equal(state, torch.get_rng_state())
    assert not out.losses.requires_grad and not any(value.requires_grad for value in out.grad_sum.values())


@pytest.mark.parametrize(("engine", "name"), NETWORKS)
def test_a_call_leaves_no_tensor_to_the_garbage_collector(engine, name):
    _, x, y = problem(name)
    grad_fn = made(name, engine, 0)
    grad_fn(x, y)
    gc.disable()
    gc.freeze()  # what was there before is not looked through
    try:
        grad_fn(x, y)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = [thing for thing in gc.garbage if type(thing) is torch.Tensor]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.unfreeze()
        gc.enable()
    assert not left


def tied(forward=lambda self, x: self.second(torch.tanh(self.first(x.flatten(1))))):
    model = Made(forward, first=nn.Linear(36, 36), second=nn.Linear(36, 36))
    model.second.weight = model.first.weight
    return model


@pytest.mark.parametrize("engine", ENGINES)
def test_a_tied_parameter_counts_once_and_a_frozen_one_not_at_all(engine):
    _, x, y = problem(dtype=torch.float64)
    model = tied().double()
    model.second.bias.requires_grad_(False)
    grad_fn = clipped_grad(model, cross_entropy, clipping_norm=0.7, engine=engine, microbatch_size=3)
    expected = clipped(gradients(model, x, y), 0.7)
    assert list(expected) == ["first.weight", "first.bias"]
    assert distance(grad_fn(x, y).grad_sum, expected) <= 1e-9 * (1 + norm(expected))


CHANGES = {
    "mode": lambda model: model[1].eval(),
    "frozen": lambda model: model[0].bias.requires_grad_(False),
    "parameter": lambda model: setattr(model[0], "weight", nn.Parameter(2 * model[0].weight.detach())),
    "value": lambda model: model[0].weight.data.mul_(2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_two_calls_counts(change):
    _, x, y = problem("linear")
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 4), nn.Dropout(0.5), nn.Linear(4, 3))[1:].train()
    x, given = x.flatten(1), {"key": bytes(32), "example_ids": torch.arange(7)}
    grad_fn = clipped_grad(model, cross_entropy, clipping_norm=1.0, engine="graph")
    before = grad_fn(x, y, **given).grad_sum
    CHANGES[change](model)
    after = grad_fn(x, y, **given).grad_sum
    fresh = clipped_grad(model, cross_entropy, clipping_norm=1.0, engine="graph")(x, y, **given).grad_sum
    assert after.keys() == fresh.keys() and distance(after, fresh) < 1e-6
    assert before.keys() != after.keys() or distance(before, after) > 1e-3


def test_another_shape_is_prepared_for_anew():
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1, 3))
    grad_fn = clipped_grad(model, cross_entropy, clipping_norm=1.0, microbatch_size=2)
    for size in (6, 8):
        assert grad_fn(torch.randn(3, 1, size, size), torch.tensor([0, 1, 2])).grad_norms.all()
    with pytest.raises(InputError, match="all of one shape"):
        grad_fn.sum_over(lambda rows: (torch.randn(len(rows), 1, 8 + int(rows[0]), 6), rows % 3), torch.arange(4))


@pytest.mark.parametrize(("engine", "workers", "used"), [("graph", 1, 1), ("graph", 2, 2), ("func", 2, 1)])
def test_examples_that_are_loaded_in_their_turn_give_what_they_give_together(engine, workers, used):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(36, 3))
    inputs, targets, key, asked = torch.randn(40, 1, 6, 6), torch.randint(3, (40,)), bytes(32), []
    indices = torch.tensor([3, 39, 8, 21, 0, 17, 30])
    keys = {"clipping_norm": 1.0, "microbatch_size": 4, "engine": engine, "workers": workers}
    grad_fn = clipped_grad(model, cross_entropy, **keys)
    grad_fn.prepare(inputs, targets)
    assert grad_fn.num_workers == used

    def load(rows):
        asked.extend(rows.tolist())
        return inputs[rows], targets[rows]

    out = grad_fn.sum_over(load, indices, key=key)
    assert sorted(asked) == sorted(indices.tolist())
    together = grad_fn(inputs[indices], targets[indices], key=key, example_ids=indices)
    assert torch.equal(out.grad_norms, together.grad_norms) and torch.equal(out.losses, together.losses)
    assert all(torch.equal(out.grad_sum[name], value) for name, value in together.grad_sum.items())
    assert not norm(grad_fn.sum_over(load, indices[:0], key=key).grad_sum)

    def damaged(rows):
        raise OSError("damaged") if 30 in rows else None
        return inputs[rows], targets[rows]

    with pytest.raises(OSError, match="damaged"):
        grad_fn.sum_over(lambda rows: damaged(rows) if 30 in rows else load(rows), indices, key=key)


@pytest.mark.parametrize(
    ("engine", "threads", "examples"),
    [("graph", 1, 7), ("graph", 3, 1), ("graph", 3, 7), ("graph", 3, 40), ("func", 3, 40)],
)
def test_all_threads_have_as_many_examples(engine, threads, examples, set_threads):
    model, x, y = problem("linear")
    set_threads(threads)
    grad_fn, sizes = clipped_grad(model, cross_entropy, clipping_norm=1.0, microbatch_size=4, engine=engine), []
    grad_fn.prepare(x, y)

    def load(rows):
        sizes.append(len(rows))
        return x[rows % 7], y[rows % 7]

    out = grad_fn.sum_over(load, torch.arange(examples))
    workers = threads if engine == "graph" else 1
    assert grad_fn.num_workers == workers and len(out.grad_norms) == sum(sizes) == examples
    assert max(sizes) <= 4 and max(sizes) - min(sizes) <= 1
    assert len(sizes) == examples or (len(sizes) % workers == 0 and len(sizes) - workers < examples / 4)
    with ThreadPoolExecutor() as another:
        assert another.submit(torch.get_num_threads).result() == torch.get_num_threads() == threads


@pytest.mark.parametrize("workers", [None, 2])
def test_a_users_load_is_called_by_one_thread_at_a_time_unless_workers_are_asked_for(workers, set_threads):
    model, x, y = problem("linear")
    set_threads(2)
    grad_fn = clipped_grad(model, cross_entropy, clipping_norm=1.0, microbatch_size=2, workers=workers)
    grad_fn.prepare(x, y)
    together = threading.Barrier(2)

    def load(rows):
        together.wait(0.2 if workers is None else 60)
        return x[rows], y[rows]

    if workers is None:
        with pytest.raises(threading.BrokenBarrierError):
            grad_fn.sum_over(load, torch.arange(4))
    else:
        grad_fn.sum_over(load, torch.arange(4))


def test_each_worker_computes_by_one_thread_whatever_is_set_before_it_computes(set_threads):
    model, x, y = problem("linear")
    set_threads(2)
    grad_fn = clipped_grad(model, cross_entropy, clipping_norm=1.0)
    grad_fn.prepare(x, y)
    both, workers = threading.Barrier(2, timeout=60), grad_fn._prepared.threads
    list(workers.map(lambda _: both.wait(), range(2)))  # they have begun
    set_threads(2)
    assert list(workers.map(lambda _: both.wait() >= 0 and torch.get_num_threads(), range(2))) == [1, 1]


def test_the_next_microbatch_is_loaded_while_one_is_computed():
    model, x, y = problem("linear")
    grad_fn = clipped_grad(model, cross_entropy, clipping_norm=1.0, microbatch_size=3, workers=1)
    grad_fn.prepare(x, y)
    threads = []

    def load(rows):
        threads.append(threading.current_thread())
        return x[rows], y[rows]

    grad_fn.sum_over(load, torch.arange(7))
    assert threads[0] is threading.main_thread() and threading.main_thread() not in threads[1:]


def test_a_model_that_mixes_examples_or_has_a_parameter_without_gradient_is_refused_by_name():
    _, x, y = problem()
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 3))
    with pytest.raises(InputError, match="BatchNorm2d at '1' mixes examples"):
        clipped_grad(model, cross_entropy, clipping_norm=1.0)(x, y)

    detached = tied(lambda self, x: self.first(x.flatten(1)) + self.second(x.flatten(1)).detach())
    with pytest.raises(InputError, match="parameter 'second.bias' receives no gradient"):
        clipped_grad(detached, cross_entropy, clipping_norm=1.0)(x, y)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clipping_norm": 0.0}, "clipping_norm must be a number from 1e-12"),
        ({"clipping_norm": float("nan")}, "clipping_norm must be a number from 1e-12"),
        ({"clipping_norm": True}, "clipping_norm must be a number"),
        ({"augmult": -1}, "augmult must be a whole number, at least 0"),
        ({"microbatch_size": 0}, "microbatch_size must be a whole number, at least 1"),
        ({"engine": "fast"}, "Known are auto, graph, func, reference"),
        ({"engine": "func", "compile": True}, 'need engine "graph"'),
    ],
)
def test_wrong_arguments_are_refused_at_once(settings, message):
    with pytest.raises(InputError, match=message):
        clipped_grad(nn.Linear(2, 1), cross_entropy, **({"clipping_norm": 1.0} | settings))


def test_wrong_shapes_and_modes_are_refused():
    model, x, y = problem()
    grad_fn = made("conv", "graph", 0)
    for given, others, message in (
        ((x, y[:2]), {}, "one target for each example"),
        ((x, y), {"is_padding": torch.zeros(7)}, "is_padding"),
        ((x, 3), {}, "must be tensors"),
        ((x, y), {"example_ids": y.float()}, "example_ids"),
    ):
        with pytest.raises(InputError, match=message):
            grad_fn(*given, **others)
    with pytest.raises(InputError, match="augmult = 3 views"):
        clipped_grad(model, cross_entropy, clipping_norm=1.0, augmult=3)(x, y)
    with pytest.raises(InputError, match="load must give one example for each index"):
        grad_fn.sum_over(lambda rows: (x[:1], y[:1]), torch.arange(5))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(InputError, match='precision="bf16"'):
        grad_fn(x, y)


@pytest.mark.parametrize("engine", ENGINES)
def test_no_engine_counts_what_is_not_real(engine):
    model, x, y = problem(dtype=torch.float64)
    is_real = torch.arange(7) % 2 == 0
    built = BUILDERS[engine](model, cross_entropy, x[:1], Speed())
    batch = Batch(x[:, None], (y[:, None],), torch.ones(7, 1).double(), is_real)
    grad_sum = built.clipped_sum(torch.ones_like, built.evaluate(), batch).grad_sum
    true = torch.autograd.grad(cross_entropy(model(x[is_real]), y[is_real]).sum(), list(model.parameters()))
    assert distance(grad_sum, dict(zip(grad_sum, true, strict=True))) < 1e-9


def test_no_microbatch_size_means_one_rule_that_shrinks_with_the_model_and_with_what_is_kept():
    model, x, y = problem()
    grad_fn = clipped_grad(model, cross_entropy, clipping_norm=1.0)
    for batch_size in (None, 4096):
        grad_fn.prepare(x, y, batch_size=batch_size)
        assert grad_fn.microbatch_size == 128
    large = nn.Sequential(nn.Flatten(), nn.Linear(36, 2**16), nn.Linear(2**16, 3))  # 2.6 million parameters
    for engine, expected in (("func", 8), ("graph", 128)):  # whose ghost norms write nothing out
        grad_fn = clipped_grad(large, cross_entropy, clipping_norm=1.0, engine=engine)
        grad_fn(x[:1], y[:1])
        assert grad_fn.microbatch_size == expected
    by_rule = clipped_grad(large, cross_entropy, clipping_norm=1.0, methods={"memory_format": "contiguous"})
    by_rule.prepare(x, y)
    assert by_rule.microbatch_size == 128
    recorded = clipped_grad(large, cross_entropy, clipping_norm=1.0, methods=by_rule.methods)
    recorded.prepare(x, y, batch_size=20)
    assert recorded.methods == by_rule.methods and recorded.microbatch_size == 20
    # A tanh keeps its result, 44 of them with 100,000 values each, and what comes back to each is kept as well.
    wide = nn.Sequential(nn.Linear(10, 300), *[nn.Tanh() for _ in range(44)], nn.Flatten(), nn.Linear(99900, 1))
    grad_fn = clipped_grad(wide, lambda outputs: outputs.sum(1), clipping_norm=1.0, engine="func")
    grad_fn.prepare(torch.randn(1, 333, 10), batch_size=4096)
    assert grad_fn.microbatch_size == 2 ** int(math.log2(2**28 / (2 * 44 * 333 * 300)))  # a gibibyte, in a power of two


@pytest.mark.parametrize("rescale", [True, False])
@pytest.mark.parametrize("count", [0, 4])
def test_what_is_released_states_how_far_one_example_moves_it(rescale, count):
    """Noise is a multiple of it: in a call, over indices, and of an empty batch."""
    model, inputs, targets = problem()
    grad_fn = made("conv", "reference", 0, clipping_norm=3.0, rescale=rescale)
    indices = torch.arange(count)
    found = grad_fn(inputs[indices], targets[indices]), grad_fn.sum_over(lambda i: (inputs[i], targets[i]), indices)
    for out in found:
        assert out.sensitivity == grad_fn.sensitivity == (1.0 if rescale else 3.0)
        assert norm(out.grad_sum) <= count * out.sensitivity * (1 + 1e-6)
