"""What one image may do to the others through the engine: nothing. And what changes between two calls counts."""

import array
import functools
import math
import signal
import types
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sfumato.clipping import clipped_grad, pure
from sfumato.clipping.graph.engine import GraphEngine
from sfumato.clipping.loss import ExampleLosses
from sfumato.errors import InputError
from tests.clipping.problems import FIXED, cross_entropy, distance


def left_out(count):
    return torch.arange(count) == 0


class Flat(nn.Module):
    def __init__(self, change=lambda values: values):
        super().__init__()
        self.layer, self.change = nn.Linear(64, 10), change

    def forward(self, images):
        return self.change(self.layer(images.flatten(1)))


def test_one_huge_image_does_not_keep_a_compiled_pass_at_the_old_loss():
    """Its own losses are large; what is rounding beside them is none beside another's."""
    weights = [torch.ones(10)]

    def loss(outputs, labels):
        return weights[0][labels] * (outputs - F.one_hot(labels, 10)).square().sum(1)

    torch.manual_seed(0)
    count = 32
    images, labels = torch.randn(count, 1, 8, 8), torch.randint(1, 10, (count,))
    images[0], labels[0] = 1e7, 0
    grad_fn = clipped_grad(Flat(), loss, clipping_norm=30.0, methods=FIXED, compile=True, microbatch_size=count)
    grad_fn(images, labels)
    weights[0] = torch.tensor([1.0] + [0.05] * 9)
    whole, without = grad_fn(images, labels).grad_sum, grad_fn(images, labels, is_padding=left_out(count)).grad_sum
    assert distance(whole, without) <= 1.001 * grad_fn.sensitivity


def one_colour(count):
    """A model and images at its kinks: one colour leaves group norm and ReLU nothing but rounding, so that any other
    way of computing turns their gradients round.
    """
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 16, 4, stride=4), nn.GroupNorm(16, 16), nn.ReLU()),
        *(nn.Conv2d(16, 16, 1), nn.GroupNorm(4, 16), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)),
    )
    return model, torch.rand(count, 3, 1, 1).expand(count, 3, 16, 16).contiguous(), torch.zeros(count).long()


@functools.cache
def at_kinks(compiles):
    model, images, labels = one_colour(32)
    keys = {"clipping_norm": 0.1, "methods": FIXED, "microbatch_size": 32}
    return clipped_grad(model, cross_entropy, compile=compiles, **keys), images, labels


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("value", [math.inf, math.nan, 1e30, 1e-40, 0.0])
def test_an_image_of_any_kind_moves_no_other_image_at_a_kink(value, compiles):
    grad_fn, images, labels = at_kinks(compiles)
    images = images.clone()
    without = grad_fn(images, labels, is_padding=left_out(32)).grad_sum
    images[0] = value
    assert distance(grad_fn(images, labels).grad_sum, without) <= 1.001 * grad_fn.sensitivity


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


KINKS = {
    "linear": (lambda: nn.Sequential(nn.Linear(256, 16), nn.ReLU(), nn.Linear(16, 2)), (256,)),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(128, 10, 1), nn.ReLU(), nn.Flatten(), nn.Linear(160, 2)),
        (128, 4, 4),
    ),
}


@pytest.mark.parametrize("engine", ["graph", "func"])
@pytest.mark.parametrize("kind", KINKS)
@pytest.mark.parametrize(("microbatch_size", "count"), [(8, 3), (8, 11), (64, 8), (64, 72)])
def test_one_image_more_is_no_other_number_of_rows_for_the_others(engine, kind, microbatch_size, count, one_thread):
    """Images at which every unit is zero but for rounding; libraries choose kernels by the number of rows."""
    torch.manual_seed(0)
    make, shape = KINKS[kind]
    model = make()
    weight, bias = model[0].weight.detach().double().flatten(1), model[0].bias.detach().double()
    grad_fn = clipped_grad(
        model, cross_entropy, clipping_norm=0.1, microbatch_size=microbatch_size, engine=engine, methods=FIXED
    )
    for _ in range(10):
        pixels = 30 * torch.randn(weight.shape[1]).double()
        pixels = (pixels - torch.linalg.pinv(weight) @ (weight @ pixels + bias)).float()
        image = pixels[:, None, None].expand(shape) if len(shape) == 3 else pixels
        images = image.expand(count + 1, *shape).contiguous()
        labels = torch.zeros(count + 1, dtype=torch.long)
        with_it, without = grad_fn(images, labels), grad_fn(images[:count], labels[:count])
        assert distance(with_it.grad_sum, without.grad_sum) <= 1.001 * grad_fn.sensitivity


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_a_loss_with_a_kink_sends_no_compiled_microbatch_another_way(precision, monkeypatch):
    """Probabilities clamped at 1e-7, as in Keras, at just 1e-7: nothing is judged by what comes of it."""
    model, images, labels = one_colour(16)

    def clamped(outputs, labels):
        return -F.softmax(outputs, 1).clamp(min=1e-7).gather(1, labels[:, None])[:, 0].log()

    keys = {"clipping_norm": 0.1, "methods": FIXED, "microbatch_size": 16, "compile": True, "precision": precision}
    grad_fn = clipped_grad(model, clamped, **keys)
    first = grad_fn(images, labels, is_padding=left_out(16)).grad_sum
    monkeypatch.setattr(GraphEngine, "run_pass", None)
    for scale in (1e2, 1e3, 1e4):
        images[0] = torch.randn(3, 16, 16) * scale
        grad_fn(images, labels)
    again = grad_fn(images, labels, is_padding=left_out(16)).grad_sum
    assert all(torch.equal(again[name], value) for name, value in first.items())


@pytest.mark.parametrize("count", [1, 8])
def test_a_changed_loss_counts_at_once_in_a_compiled_bf16_pass(count):
    """Though one example alone shows the change."""
    weights = [torch.ones(10)]

    def loss(outputs, labels):
        return weights[0][labels] * cross_entropy(outputs, labels)

    torch.manual_seed(0)
    images, labels = torch.randn(8, 1, 8, 8), torch.arange(8)
    keys = {"clipping_norm": 100.0, "methods": FIXED, "microbatch_size": count}
    compiled = clipped_grad(Flat(), loss, **keys, compile=True, precision="bf16")
    compiled(images, labels)
    weights[0] = torch.tensor([50.0] + [1.0] * 9)
    fast, true = (
        grad_fn(images, labels)
        for grad_fn in (compiled, clipped_grad(compiled._model, loss, **keys, engine="reference"))
    )
    assert distance(fast.grad_sum, true.grad_sum) <= 0.02 * distance(true.grad_sum, {}.fromkeys(true.grad_sum, ZERO))
    assert torch.allclose(fast.losses, true.losses, rtol=0.02)


ZERO = torch.zeros(())


def test_an_image_that_counts_for_nothing_changes_no_rounding_of_a_compiled_bf16_pass():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.GroupNorm(2, 8),
        nn.GELU(),
        nn.Conv2d(8, 8, 3),
        nn.GroupNorm(2, 8),
        nn.Flatten(),
        nn.Linear(128, 10),
    )
    count = 32
    images = 0.3 * torch.randn(1, 3, 8, 8) + 0.01 * torch.randn(count, 3, 8, 8)
    labels, keys = (
        torch.zeros(count, dtype=torch.long),
        {"clipping_norm": 0.1, "methods": FIXED, "microbatch_size": count},
    )
    grad_fn = clipped_grad(model, cross_entropy, **keys, compile=True, precision="bf16")
    without = grad_fn(images, labels, is_padding=left_out(count)).grad_sum
    images[0] = math.inf
    assert distance(grad_fn(images, labels).grad_sum, without) <= 1e-4


@pytest.mark.parametrize(
    "made",
    [torch.empty_like, lambda h: h.new_empty(h.shape), lambda h: torch.empty(h.shape)],
    ids=["like", "new", "shape"],
)
def test_memory_that_nobody_filled_is_no_part_of_a_proof(made):
    model = Flat(lambda values: torch.where(made(values).abs() > 1e30, -values, values))
    with pytest.raises(InputError):
        clipped_grad(model, cross_entropy, clipping_norm=1.0, engine="graph")(
            torch.randn(4, 1, 8, 8), torch.zeros(4, dtype=torch.long)
        )


CONSTANTS = {
    "empty": lambda n: torch.empty(n),
    "Tensor": lambda n: torch.Tensor(n),
    "strided": lambda n: torch.empty_strided((n,), (1,)),
    "like": lambda n: torch.empty_like(torch.zeros(n)),
    "resized": lambda n: torch.zeros(0).resize_(n),
    "resized as": lambda n: torch.zeros(0).resize_as_(torch.zeros(n)),
    "out": lambda n: torch.add(torch.zeros(n), 0, out=torch.empty(0)) + torch.empty(n),
    "of another type": lambda n: torch.empty(n, dtype=torch.int32).view(torch.float32),
    "the value of a fill": lambda n: torch.zeros(n).fill_(torch.empty(())),
    "half filled": lambda n: torch.empty(n).index_fill(0, torch.arange(n // 2), 0.0),
    "as strided": lambda n: torch.zeros(n).as_strided((n,), (1,)),
}


@pytest.mark.parametrize("made", CONSTANTS.values(), ids=CONSTANTS.keys())
def test_nor_is_it_where_no_image_reaches_it(made):
    """It may hold what images of an earlier step left there."""
    model = Flat(lambda values: values + 40 * (made(768) == 1.55e6).sum().clamp(max=1))
    with pytest.raises(InputError, match="what images left in memory|cannot be traced"):
        clipped_grad(model, cross_entropy, clipping_norm=1.0, engine="graph")(
            torch.randn(4, 1, 8, 8), torch.zeros(4, dtype=torch.long)
        )


@pytest.mark.parametrize(
    "made",
    [
        lambda n: torch.empty(n).fill_(0.5),
        lambda n: torch.empty(n).zero_() + torch.linspace(0, 1, n),
        lambda n: torch.arange(n) / n + torch.eye(n).sum(0),
        lambda n: torch.hann_window(n) + torch.tril(torch.ones(n, n))[0] + torch.tensor([0.25]),
    ],
)
def test_constants_that_are_the_same_at_every_call_are(made):
    model = Flat(lambda values: values + made(10))
    grad_fn = clipped_grad(model, cross_entropy, clipping_norm=1.0)
    grad_fn(torch.randn(4, 1, 8, 8), torch.zeros(4, dtype=torch.long))
    assert grad_fn.engine == "graph"


@pytest.mark.parametrize("engine", ["graph", "func", "reference"])
@pytest.mark.parametrize("rescale", [True, False])
@pytest.mark.parametrize(("clipping_norm", "value"), [(1e-6, 2.85e38), (1e-8, 1.3e37), (1e-12, 1.3e33), (1.0, 3e38)])
def test_a_gradient_at_the_end_of_float32_counts_no_more_than_any(engine, rescale, clipping_norm, value):
    options = {"clipping_norm": clipping_norm, "engine": engine, "rescale_to_unit_norm": rescale}
    grad_fn = clipped_grad(nn.Linear(4, 1, bias=False), lambda outputs: outputs[:, 0], **options)
    total = grad_fn(torch.tensor([[value, 0.0, 0.0, 0.0]])).grad_sum["weight"].double().norm()
    assert float(total) <= 1.001 * grad_fn.sensitivity


class Clamped(nn.Conv2d):
    """Weight standardisation, with no weight beyond three standard deviations."""

    def forward(self, images):
        spread, mean = torch.var_mean(self.weight, dim=(1, 2, 3), keepdim=True, unbiased=False)
        weight = ((self.weight - mean) / torch.sqrt(spread + 1e-5)).clamp(-3, 3)
        return F.conv2d(images, weight / weight[0].numel() ** 0.5, self.bias, self.stride, self.padding)


def test_one_weight_that_no_longer_follows_the_closed_form_is_seen():
    torch.manual_seed(0)
    model = nn.Sequential(
        Clamped(3, 32, 3, padding=1), nn.ReLU(), Clamped(32, 32, 3, padding=1), nn.Flatten(), nn.Linear(32 * 64, 10)
    )
    images, labels = torch.randn(3, 3, 8, 8), torch.tensor([0, 1, 2])
    grad_fn = clipped_grad(model, cross_entropy, clipping_norm=1.0, methods=FIXED)
    grad_fn(images, labels)
    with torch.no_grad():
        model[2].weight[1, 0, 0, 0] = 0.3
    found = grad_fn(images, labels).grad_sum
    expected = clipped_grad(model, cross_entropy, clipping_norm=1.0, engine="reference")(images, labels).grad_sum
    assert distance(found, expected) <= 1e-4 * math.sqrt(
        sum(float(value.square().sum()) for value in expected.values())
    )


class Held:
    def __init__(self):
        self.scale = 1.0


class Settings(nn.Module):
    """Scales by what a setting of some kind holds."""

    def __init__(self, kind):
        super().__init__()
        self.layer, self.kind = nn.Linear(64, 10), kind
        self.held = Held()
        self.inside = {"scale": 1.0}
        self.teacher = [nn.Linear(64, 10)]
        self.setting = {
            "weak": lambda: weakref.ref(self.held),
            "view": lambda: types.MappingProxyType(self.inside),
            "array": lambda: array.array("d", [1.0]),
            "bytes": lambda: bytearray([1]),
            "teacher": lambda: self.teacher,
        }[kind]()
        if kind != "teacher":
            del self.teacher

    def scale(self):
        if self.kind == "weak":
            return self.setting().scale
        return self.setting["scale"] if self.kind == "view" else float(self.setting[0])

    def change(self):
        if self.kind == "weak":
            self.held.scale = -3.0
        elif self.kind == "view":
            self.inside["scale"] = -3.0
        elif self.kind == "teacher":
            for parameter in self.teacher[0].parameters():
                parameter.data = parameter.data * -2.0
        else:
            self.setting[0] = 3

    def forward(self, images):
        images = images.flatten(1)
        if self.kind == "teacher":
            return self.layer(images) + self.setting[0](images).detach()
        return self.layer(images) * self.scale()


@pytest.mark.parametrize("kind", ["weak", "view", "array", "bytes", "teacher"])
def test_settings_of_every_kind_that_change_between_two_calls_count(kind):
    torch.manual_seed(0)
    model, images, labels = Settings(kind), torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, 3])
    grad_fn = clipped_grad(model, cross_entropy, clipping_norm=1000.0)
    before = grad_fn(images, labels).grad_sum
    model.change()
    expected = clipped_grad(model, cross_entropy, clipping_norm=1000.0, engine="reference")(images, labels).grad_sum
    assert distance(before, expected) > 1e-4
    assert distance(grad_fn(images, labels).grad_sum, expected) <= 1e-6


def test_a_table_that_code_keeps_outside_of_the_model_has_the_model_s_precision():
    kept = {}

    def with_table(values):
        if len(kept) == 0:
            kept["table"] = torch.arange(10, dtype=values.dtype) / 10
        return values + kept["table"].to(values.device)

    model, images = Flat(with_table), torch.randn(4, 1, 8, 8)
    clipped_grad(model, cross_entropy, clipping_norm=1.0)(images, torch.zeros(4, dtype=torch.long))
    assert kept["table"].dtype == torch.float32 and model(images).dtype == torch.float32


@pytest.mark.parametrize(
    "change",
    [
        lambda v: v * ((v > -1) & (v < 1)),
        lambda v: v * ((v > 1) | (v < -1)),
        lambda v: torch.max(v, -v),
        lambda v: torch.min(v, 2 * v),
    ],
)
def test_what_works_on_each_entry_stays_with_the_fast_engine(change):
    grad_fn = clipped_grad(Flat(change), cross_entropy, clipping_norm=1.0)
    grad_fn(torch.randn(4, 1, 8, 8), torch.zeros(4, dtype=torch.long))
    assert grad_fn.engine == "graph", grad_fn.refusal


def safe_cholesky(outputs, targets):
    """As people write it: where a matrix is not positive definite, all get a little more on the diagonal."""
    matrices = outputs.view(-1, 2, 2) @ outputs.view(-1, 2, 2).transpose(1, 2)
    try:
        roots = torch.linalg.cholesky(matrices)
    except RuntimeError:
        roots = torch.linalg.cholesky(matrices + 0.1 * torch.eye(2))
    return roots.diagonal(dim1=1, dim2=2).log().sum(1) + 0.01 * targets


@pytest.mark.parametrize("compiles", [False, True])
def test_an_error_that_one_image_raises_is_no_other_s_to_catch(compiles):
    torch.manual_seed(0)
    images, targets = torch.rand(16, 3, 8, 8), torch.ones(16)
    images[0] = 0.0
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 4, bias=False))
    loss = pure(lambda outputs, targets: safe_cholesky(outputs, targets))
    grad_fn = clipped_grad(model, loss, clipping_norm=0.01, microbatch_size=16, compile=compiles)
    with_it = grad_fn(images, targets).grad_sum
    without = grad_fn(images, targets, is_padding=left_out(16)).grad_sum
    assert distance(with_it, without) <= 1.001 * grad_fn.sensitivity


class Whitener:
    """A helper: no name in the model's own code leads to its `try`."""

    def __call__(self, images):
        try:
            squares = torch.einsum("nabc,nabd->ncd", images, images)
            return torch.linalg.cholesky(squares + torch.eye(images.shape[-1]))[:, :1, 0]
        except RuntimeError:
            return torch.ones(len(images), 1)


def test_under_torch_func_no_image_s_error_is_another_s_to_handle():
    """The call ends: what the others would have given is not known."""

    class Whitens(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.scale = nn.Linear(16, 4), Whitener()

        def forward(self, images):
            return self.layer(images.flatten(1)) * self.scale(images)

    grad_fn = clipped_grad(Whitens(), cross_entropy, clipping_norm=1.0)
    images, labels = torch.randn(4, 1, 4, 4), torch.zeros(4).long()
    grad_fn(images, labels)
    assert grad_fn.engine == "func"
    images[0] = 3e38
    with pytest.raises(InputError, match="handles an error"):
        grad_fn(images, labels)


class Scaled:
    """As automatic mixed precision does."""

    scale = 1.0

    def __call__(self, outputs, labels):
        losses = cross_entropy(outputs, labels)
        if not losses.isfinite().all():
            self.scale *= 0.5
        return losses * self.scale


def bce(outputs, labels):
    """PyTorch raises where a probability is not one."""
    return F.binary_cross_entropy(outputs.sigmoid(), F.one_hot(labels, 10).float(), reduction="none").mean(1)


def categorical(outputs, labels):
    return -torch.distributions.Categorical(logits=outputs).log_prob(labels)


@pytest.mark.parametrize(
    "make", [lambda: pure(Scaled()), lambda: pure(bce), lambda: pure(categorical)], ids=["scaled", "bce", "categorical"]
)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("engine", ["graph", "func", "reference"])
def test_the_loss_sees_nothing_of_an_image_whose_outputs_are_not_finite(make, value, engine):
    torch.manual_seed(0)
    images, labels = torch.randn(8, 1, 8, 8), torch.arange(8)
    grad_fn = clipped_grad(Flat(), pure(make()), clipping_norm=1.0, engine=engine)
    without = grad_fn(images, labels, is_padding=left_out(8)).grad_sum
    images[0] = value
    out = grad_fn(images, labels)
    assert not out.losses[0].isfinite() and out.losses[1:].isfinite().all()
    assert distance(out.grad_sum, without) <= 1e-5


def counting(decay):
    """A loss that counts its calls in an attribute, and one that does in a variable."""

    class Later:
        calls = 0

        def __call__(self, outputs, labels):
            self.calls += 1
            return cross_entropy(outputs, labels) * decay**self.calls

    def make():
        count = 0

        def loss(outputs, labels):
            nonlocal count
            count += 1
            return cross_entropy(outputs, labels) * decay**count

        return loss

    return Later(), make()


@pytest.mark.parametrize("engine", ["graph", "func", "reference"])
def test_a_loss_that_depends_on_how_often_it_was_called_is_refused(engine):
    """How often says how many images were drawn."""
    images, labels = torch.randn(4, 1, 8, 8), torch.zeros(4).long()
    for decay in (0.9, 1.0):
        for loss in counting(decay):
            with pytest.raises(InputError, match="keeps something of them|count outside of it"):
                clipped_grad(Flat(), loss, clipping_norm=1.0, engine=engine)(images, labels)


class Caught(nn.Module):
    def forward(self, outputs, targets):
        return safe_cholesky(outputs, targets)


caught = Caught()


class Swallows:
    def __enter__(self):
        return self

    def __exit__(self, *error):
        return True


def swallowing(outputs, targets):
    losses = outputs.sum(-1)
    with Swallows():
        losses = torch.linalg.cholesky(torch.diag_embed(outputs * outputs)).diagonal(dim1=-1, dim2=-2).log().sum(-1)
    return losses


def fails_at_some(outputs, targets):
    """At no made-up image, nor at the zeros on which it is traced."""
    try:
        return torch.linalg.cholesky(torch.diag_embed(1e6 - outputs)).diagonal(dim1=-1, dim2=-2).log().sum(-1)
    except RuntimeError:
        return outputs.sum(-1)


CATCHERS = {
    "global module": lambda outputs, targets: caught(outputs, targets),
    "class": lambda outputs, targets: Caught()(outputs, targets),
    "list": lambda outputs, targets: [safe_cholesky][0](outputs, targets),
    "context manager": swallowing,
}


@pytest.mark.parametrize("engine", ["graph", "func"])
@pytest.mark.parametrize("catcher", CATCHERS)
def test_an_error_is_nobody_else_s_to_catch_however_the_loss_is_written(catcher, engine):
    torch.manual_seed(0)
    images, targets = torch.rand(16, 3, 8, 8), torch.ones(16)
    images[0] = 0.0
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 4, bias=False))
    loss = pure(CATCHERS[catcher])
    grad_fn = clipped_grad(model, loss, clipping_norm=0.01, microbatch_size=16, engine=engine)
    with_it = grad_fn(images, targets).grad_sum
    without = grad_fn(images, targets, is_padding=left_out(16)).grad_sum
    assert distance(with_it, without) <= 1.001 * grad_fn.sensitivity


def log_or_sum(outputs, labels):
    try:
        return torch.linalg.cholesky(torch.diag_embed(outputs * outputs)).diagonal(dim1=-1, dim2=-2).log().sum(-1)
    except RuntimeError:
        return outputs.sum(-1)


def one_hot_by_hand(outputs, labels):
    """vmap does not write into what it did not batch."""
    wanted = torch.zeros(len(labels), outputs.shape[1], dtype=outputs.dtype)
    wanted.scatter_(1, labels[:, None], 1.0)
    return (outputs - wanted).square().sum(1)


LOSSES = {
    "one hot": one_hot_by_hand,
    "prod": lambda outputs, labels: outputs.prod(-1),
    "cross entropy": cross_entropy,
    "branches": lambda outputs, labels: outputs.prod(-1) if outputs.sum() > 0 else outputs.square().prod(-1),
    "log of a matrix": log_or_sum,
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("value", [0.0, 1e30, 1e-40, -math.inf, math.nan])
def test_no_image_chooses_the_formula_of_another_s_gradient(loss, value):
    """A zero among outputs makes PyTorch differentiate `prod` otherwise, for the whole tensor."""
    torch.manual_seed(0)
    outputs, labels = torch.randn(64, 1, 4), torch.arange(64) % 4
    changed = outputs.clone()
    changed[0] = value
    losses = ExampleLosses(pure(LOSSES[loss]))
    (one, (first,)), (other, (second,)) = losses(outputs, (labels,), 1), losses(changed, (labels,), 1)
    assert torch.equal(one[1:], other[1:]) and torch.equal(first[1:], second[1:])


def test_a_loss_that_keeps_what_it_computes_is_no_trap_for_two_workers():
    class Parts:
        def __init__(self):
            self.of = {}

        def __call__(self, outputs, labels):
            self.of["log"] = F.log_softmax(outputs, -1)
            if float(self.of["log"].detach().sum()) > 0:  # looks at values: one example after another
                raise AssertionError
            self.of["entropy"] = -(self.of["log"].exp() * self.of["log"]).sum(-1)
            return -self.of["log"].gather(1, labels[:, None])[:, 0] - 0.1 * self.of["entropy"]

    torch.manual_seed(0)
    images, labels = torch.randn(256, 6), torch.arange(256) % 10
    model = nn.Linear(6, 10)
    loss = pure(Parts())
    one, two = (
        clipped_grad(model, loss, clipping_norm=1.0, microbatch_size=8, workers=workers, engine="graph")
        for workers in (1, 2)
    )
    assert distance(one(images, labels).grad_sum, two(images, labels).grad_sum) <= 1e-4


@pytest.mark.parametrize("engine", ["graph", "func", "reference"])
def test_tables_and_weights_that_a_loss_makes_at_its_first_call_are_no_change(engine):
    class Tables:
        table = None

        def __init__(self):
            self.weights, self.cache = torch.ones(4), {}

        def __call__(self, outputs, labels):
            if self.table is None:
                self.table = torch.eye(outputs.shape[1], dtype=outputs.dtype)
            self.weights = self.weights.to(outputs)
            self.cache.setdefault(outputs.shape[1], torch.ones(4, 4, dtype=outputs.dtype).tril())
            self.last = outputs.detach()
            mixed = outputs @ self.table @ self.cache[outputs.shape[1]]
            return F.cross_entropy(mixed * self.weights, labels, reduction="none")

    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
    clipped_grad(model, Tables(), clipping_norm=1.0, engine=engine)(torch.randn(4, 1, 8, 8), torch.arange(4))


@pytest.mark.parametrize("engine", ["graph", "func", "reference"])
def test_a_schedule_may_come_to_look_at_values(engine):
    class Clamps:
        epoch = 0

        def __call__(self, outputs, labels):
            losses = cross_entropy(outputs, labels)
            return losses.clamp(max=2.0) if self.epoch and losses.max() > 2.0 else losses

    loss = Clamps()
    torch.manual_seed(0)
    images, labels = 5 * torch.randn(8, 1, 8, 8), torch.zeros(8).long()
    grad_fn = clipped_grad(Flat(), loss, clipping_norm=1.0, engine=engine)
    assert grad_fn(images, labels).losses.max() > 2.0
    loss.epoch = 1
    with pytest.raises(InputError, match="it looks at values.*promise so"):
        grad_fn(images, labels)


@pytest.mark.parametrize("engine", ["graph", "func", "reference"])
@pytest.mark.parametrize("augmult", [0, 2])
def test_a_loss_may_write_to_what_it_is_given(engine, augmult):
    def in_place(outputs, labels):
        outputs /= 2.0
        labels -= 1
        return cross_entropy(outputs, labels)

    def plain(outputs, labels):
        return cross_entropy(outputs / 2.0, labels - 1)

    torch.manual_seed(0)
    model, labels = Flat(), torch.randint(1, 10, (5,))
    images = torch.randn(5, *([augmult] if augmult else []), 1, 8, 8)
    keys = {"clipping_norm": 1.0, "augmult": augmult}
    found = clipped_grad(model, in_place, engine=engine, **keys)(images, labels)
    true = clipped_grad(model, plain, engine="reference", **keys)(images, labels)
    assert distance(found.grad_sum, true.grad_sum) <= 1e-5
    assert labels.min() >= 1  # the caller's own are left alone


def test_a_product_of_values_is_not_the_fast_engine_s():
    """Its derivative is another formula for all images where one holds a zero."""
    model = Flat(lambda values: values.unflatten(1, (5, 2)).prod(2))
    grad_fn = clipped_grad(model, lambda outputs: outputs.square().sum(1), clipping_norm=1.0)
    grad_fn(torch.randn(4, 1, 8, 8))
    assert grad_fn.engine == "func"


def test_threads_take_turns_where_the_model_is_not_its_own():
    torch.manual_seed(0)
    images, labels = torch.randn(6, 1, 8, 8), torch.arange(6)
    grad_fn = clipped_grad(Flat(), cross_entropy, clipping_norm=1.0, engine="func")
    true = grad_fn(images, labels).grad_sum
    with ThreadPoolExecutor(3) as pool:
        for out in pool.map(lambda _: grad_fn(images, labels), range(12)):
            assert distance(out.grad_sum, true) == 0.0


def test_what_would_end_a_call_at_one_image_is_refused_beforehand():
    grad_fn = clipped_grad(Flat(), cross_entropy, clipping_norm=1.0)
    torch.autograd.set_detect_anomaly(True)
    try:
        with pytest.raises(InputError, match="detect_anomaly"):
            grad_fn(torch.randn(4, 1, 8, 8), torch.zeros(4).long())
    finally:
        torch.autograd.set_detect_anomaly(False)


def test_weights_in_another_memory_format_are_no_unknown_site():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)
    )
    images, labels = torch.randn(5, 3, 8, 8), torch.arange(5)
    for _ in range(4):
        grad_fn = clipped_grad(model.to(memory_format=torch.contiguous_format), cross_entropy, clipping_norm=0.5)
        before = grad_fn(images, labels).grad_sum
        model.to(memory_format=torch.channels_last)
        assert distance(grad_fn(images, labels).grad_sum, before) <= 1e-4


class Interrupting(nn.Module):
    """Ctrl-C comes in the middle of a pass."""

    def __init__(self):
        super().__init__()
        self.layer, self.comes, self.went_on = nn.Linear(4, 3), [], []

    def forward(self, images):
        if self.comes and images.sum() != 0:  # looks at values: one image at a time
            signal.raise_signal(signal.SIGINT)
            np.array(0)  # Python handles signals between two of its own instructions
            INTERRUPTED.append(True)
        return self.layer(F.dropout(images, 0.5))


INTERRUPTED = []


def test_an_interrupt_waits_for_the_end_of_a_microbatch():
    """Cut short, it would leave PyTorch's modes switched on, and with them draws that ignore their generator."""
    torch.manual_seed(0)
    model = Interrupting()
    grad_fn = clipped_grad(model, cross_entropy, clipping_norm=1.0, engine="reference", microbatch_size=4)
    images, labels = torch.randn(4, 4), torch.zeros(4).long()
    given = {"key": bytes(32), "example_ids": torch.arange(4)}
    grad_fn(images, labels, **given)
    model.comes.append(True)
    with pytest.raises(KeyboardInterrupt):
        grad_fn(images, labels, **given)
    assert INTERRUPTED
    drawn = [torch.randn(4, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    assert not torch.equal(*drawn)


@pytest.mark.parametrize("loss", ["one hot", "prod", "cross entropy"])
def test_a_loss_however_it_is_written_leaves_a_model_with_the_fast_engine(loss):
    torch.manual_seed(0)
    images, labels = torch.randn(4, 1, 8, 8), torch.arange(4)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
    fast, slow = (clipped_grad(model, LOSSES[loss], clipping_norm=1.0, engine=name) for name in ("auto", "reference"))
    assert distance(fast(images, labels).grad_sum, slow(images, labels).grad_sum) < 1e-5 and fast.engine == "graph"


@pytest.mark.parametrize("engine", ["graph", "func"])
def test_a_handler_of_the_loss_does_not_take_what_tracing_raises(engine):
    def loss(outputs, labels):
        try:
            largest = max(outputs.tolist()[0])
        except Exception:
            largest = 0.0
        return cross_entropy(outputs, labels) * (2.0 if largest > 1e6 else 1.0)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 4))
    images, labels = torch.randn(6, 3, 2, 2), torch.arange(6) % 4
    fast, slow = (clipped_grad(model, pure(loss), clipping_norm=100.0, engine=name) for name in (engine, "reference"))
    fast(images, labels)
    with torch.no_grad():
        model[1].bias[0] += 2e6
    assert distance(fast(images, labels).grad_sum, slow(images, labels).grad_sum) < 1e-4


@pytest.mark.parametrize("engine", ["graph", "func", "reference"])
def test_a_loss_may_hold_a_teacher_whose_parameters_train_elsewhere(engine):
    torch.manual_seed(0)
    teacher = nn.Linear(4, 4)

    def distil(outputs, labels):
        with torch.no_grad():
            wanted = teacher(outputs).softmax(1)
        return cross_entropy(outputs, labels) + F.kl_div(outputs.log_softmax(1), wanted, reduction="none").sum(1)

    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 4))
    images, labels = torch.randn(6, 3, 2, 2), torch.arange(6) % 4
    out = clipped_grad(model, distil, clipping_norm=1.0, engine=engine)(images, labels)
    truth = clipped_grad(model, distil, clipping_norm=1.0, engine="reference")(images, labels)
    assert distance(out.grad_sum, truth.grad_sum) < 1e-5 and not out.losses.requires_grad


def test_torch_func_takes_a_model_that_returns_nothing_beside_its_outputs():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, images):
            return self.layer(images), None

    loss = lambda outputs, labels: cross_entropy(outputs[0], labels)  # noqa: E731
    fast, slow = (clipped_grad(Pair(), loss, clipping_norm=1.0, engine=name) for name in ("func", "reference"))
    images, labels = torch.randn(4, 4), torch.zeros(4).long()
    assert fast(images, labels).grad_norms.shape == slow(images, labels).grad_norms.shape == (4,)


@pytest.mark.parametrize("engine", ["graph", "func"])
def test_an_error_that_shows_at_no_made_up_image_is_nobody_else_s_to_catch(engine):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 4))
    images, targets = torch.rand(8, 3, 2, 2), torch.ones(8)
    with torch.no_grad():
        model[1].weight.abs_()
    grad_fn = clipped_grad(model, pure(fails_at_some), clipping_norm=1e-9, microbatch_size=8, engine=engine)
    without = grad_fn(images, targets).grad_sum
    images[0] = 1e9
    assert distance(grad_fn(images, targets).grad_sum, without) <= 2 * 1.001  # one replaced by another


class TiedTokens(nn.Module):
    """Names a token from five others; the embedding shortens long rows in place as they are looked up."""

    def __init__(self):
        super().__init__()
        self.tokens, self.hidden = nn.Embedding(200, 16, max_norm=6.0), nn.Linear(16, 16)

    def forward(self, tokens):
        return torch.tanh(self.hidden(self.tokens(tokens).mean(1))) @ self.tokens.weight.T


class MaxNorm(nn.Linear):
    """Shortens its own weight where training made it long, as networks for brain waves do."""

    def __init__(self, way):
        super().__init__(6, 3)
        self.way = way

    def forward(self, rows):
        with torch.no_grad():
            short = torch.renorm(self.weight, 2, 0, 1.0)
            if self.way == "data":
                self.weight.data = short
            elif self.way == "through data":
                self.weight.data.copy_(short)
            else:
                self.weight.copy_(short)
        return super().forward(rows)


def test_an_image_that_changes_a_parameter_changes_it_for_itself_alone():
    """Made-up tokens are 0 and 1, whose rows are short: nothing shows before the first image."""
    model = TiedTokens()
    with torch.no_grad():
        model.tokens.weight[7] *= 60 / model.tokens.weight[7].norm()
    before = model.tokens.weight.detach().clone()
    tokens, targets = torch.randint(8, 200, (20, 5)), torch.randint(8, 200, (20,))
    tokens[0] = 7
    grad_fn = clipped_grad(model, cross_entropy, clipping_norm=0.01)
    grad_fn.prepare(tokens[:1], targets[:1])
    whole, others = (grad_fn(tokens[first:], targets[first:]).grad_sum for first in (0, 1))
    assert grad_fn.engine == "reference" and distance(whole, others) <= 1.001 * grad_fn.sensitivity
    assert torch.equal(model.tokens.weight, before)


@pytest.mark.parametrize("way", ["data", "through data", "in place"])
@pytest.mark.parametrize("engine", ["func", "reference"])
def test_a_constraint_that_wakes_up_leaves_the_parameters_as_they_were(way, engine):
    model = nn.Sequential(nn.Flatten(), MaxNorm(way))
    with torch.no_grad():
        model[1].weight *= 0.1
    rows, targets = torch.randn(5, 6), torch.randint(3, (5,))
    try:
        grad_fn = clipped_grad(model, cross_entropy, clipping_norm=1.0, engine=engine)
        grad_fn.prepare(rows[:1], targets[:1])
    except InputError:
        return
    with torch.no_grad():
        model[1].weight *= 200
    before = model[1].weight.detach().clone()
    grad_fn(rows, targets)
    assert torch.equal(model[1].weight, before)


@pytest.mark.parametrize(
    "settings",
    [{"engine": engine} for engine in ("graph", "func", "reference")] + [{"precision": "bf16"}, {"workers": 2}],
    ids=str,
)
def test_inference_mode_is_refused_at_every_call(settings):
    rows, targets = torch.randn(6, 8), torch.randint(3, (6,))
    grad_fn = clipped_grad(nn.Linear(8, 3), cross_entropy, clipping_norm=1.0, **settings)
    grad_fn(rows, targets)
    with torch.inference_mode():
        for call in (
            lambda: grad_fn(rows, targets),
            lambda: grad_fn.sum_over(torch.arange(6), lambda chosen: [rows[chosen], targets[chosen]]),
            lambda: grad_fn.verify(1),
        ):
            with pytest.raises(InputError, match="inference_mode"):
                call()


ROWS, TARGETS = torch.randn(6, 1, 8, 8), torch.randint(3, (6,))


def given(**settings):
    model = nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(64, 3))
    return clipped_grad(model, cross_entropy, **{"clipping_norm": 1.0, **settings})


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: given()(ROWS, TARGETS, is_padding=[False] * 6), "is_padding must be a tensor"),
        (lambda: given()(ROWS, TARGETS, key=bytes(32), example_ids=list(range(6))), "example_ids must be a tensor"),
        (lambda: given()(ROWS, torch.tensor(1)), "a dimension that counts examples"),
        (lambda: given()(torch.tensor(1.0)), "a dimension that counts examples"),
        (lambda: given()(ROWS.to_sparse(), TARGETS), "dense"),
        (lambda: given(clipping_norm="1"), "must be a number"),
        (lambda: given(microbatch_size=4.0), "whole number"),
        (lambda: given(workers=1.0), "whole number"),
        (lambda: given(augmult=1.5), "whole number"),
        (lambda: given().sum_over([0, 1], None), "tensor of int64"),
    ],
)
def test_what_is_no_batch_is_refused_in_one_line(call, says):
    with pytest.raises(InputError, match=says) as refused:
        call()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("engine", ["graph", "func", "reference"])
@pytest.mark.parametrize("load", [lambda rows: rows[1:], lambda rows: torch.cat([rows, rows])])
def test_a_loader_gives_one_example_for_each_index(engine, load):
    grad_fn = clipped_grad(
        nn.Sequential(nn.Flatten(), nn.Linear(64, 3)),
        cross_entropy,
        clipping_norm=1.0,
        microbatch_size=4,
        engine=engine,
    )
    with pytest.raises(InputError, match="load gave . examples for"):
        grad_fn.sum_over(torch.arange(6), lambda rows: [ROWS[load(rows)], TARGETS[load(rows)]])
