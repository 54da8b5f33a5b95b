"""The one check before the first image: what it must find, what it must let pass, and that it leaves nothing behind.

The zoo (`tests/clipping/zoo`) has the models; here are messages, and planted faults.
"""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sfumato.clipping import clipped_grad, engine_check
from sfumato.clipping.engine_check import EngineCheck
from sfumato.clipping.graph.rules import METHODS
from sfumato.clipping.graph.rules.site import MaterializedGrads
from sfumato.clipping.prepared import BUILDERS
from sfumato.clipping.probe import made_up_images, made_up_targets, temporary_values
from sfumato.errors import InputError
from tests.clipping.problems import FIXED, Do, Made, cross_entropy, distance, norm

ENGINES = ["reference", "func", "graph"]
IMAGES, TARGETS = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0])


def net(middle=None, dtype=torch.float32):
    torch.manual_seed(0)
    middle = nn.Identity() if middle is None else middle if isinstance(middle, nn.Module) else Do(middle)
    return nn.Sequential(nn.Conv2d(3, 4, 3), middle, nn.Tanh(), nn.Flatten(), nn.Linear(64, 3)).to(dtype)


def run(model, engine="auto", **settings):
    settings = {"clipping_norm": 1.0, "methods": FIXED, "engine": engine, "microbatch_size": 4} | settings
    grad_fn = clipped_grad(model, cross_entropy, **settings)
    return grad_fn, grad_fn(IMAGES, TARGETS)


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x


class Remembers(nn.Module):
    last = 0.0

    def forward(self, x):
        x, self.last = x + self.last, x.detach().mean()
        return x


class Sleeps(nn.Module):
    def forward(self, x):
        self.train(False)
        return x


REFUSED = {
    "takes the batch's mean off": (lambda x: x - x.mean(0), "other outputs than the image alone"),
    "scales rows by their number": (
        lambda x: x * (1 + torch.arange(x.shape[0]).view(-1, 1, 1, 1)),
        "other outputs than the image alone",
    ),
    "attends to the batch": (
        lambda x: F.scaled_dot_product_attention(*[x.flatten(1)[None]] * 3)[0].view_as(x),
        "other outputs than the image alone",
    ),
    "counts calls in a buffer": (Counts(), "Counts at '1' changes 'calls'"),
    "remembers in an attribute": (Remembers(), "other outputs than the image alone|another result after other images"),
    "changes its mode": (Sleeps(), "Sleeps at '1' changes 'training'"),
    "draws for the batch": (lambda x: x * torch.rand(1, 4, 1, 1), "belong to the whole batch"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_function_of_one_image_is_refused_and_left_as_it_was(name):
    """Before any engine is tried."""
    middle, message = REFUSED[name]
    model = net(middle).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(InputError, match=message):
        run(model, "reference")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert all(parameter.grad is None and parameter.dtype == torch.float32 for parameter in model.parameters())


def attending(layer, given):
    def tokens(self, x):
        found = self.layer(*[x.flatten(2).transpose(1, 2)] * given)
        return (found[0] if isinstance(found, tuple) else found).sum(1)

    return Made(tokens, layer=layer)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(192, 4), Do(torch.squeeze)), r"gives \(4,\), and no row.*squeeze\(\)"),
        (nn.Sequential(nn.AvgPool2d(8), Do(torch.squeeze), nn.Flatten(), nn.Linear(3, 4)), r"one too: flatten\(1\)"),
        (attending(nn.MultiheadAttention(3, 1), 3), "than the image alone.*MultiheadAttention .* batch_first=True"),
        (attending(nn.TransformerEncoderLayer(3, 1, 8), 1), "draws random numbers .*batch_first=True"),
    ],
)
def test_a_refusal_says_what_would_work(model, says):
    with pytest.raises(InputError, match=says):
        clipped_grad(model, nn.CrossEntropyLoss(), clipping_norm=1.0).prepare(torch.zeros(2, 3, 8, 8), TARGETS[:2])


class Turned(torch.autograd.Function):
    """Whose gradient is not its derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return -grad


def doubling(model):
    model[0].weight.register_hook(lambda grad: 2 * grad)
    return model


@pytest.mark.parametrize(
    "make",
    [
        lambda: net(lambda x: x * x.detach()),
        lambda: net(Turned.apply),
        lambda: doubling(net()),
        lambda: net(lambda x: x.clone() if torch.is_grad_enabled() else 2 * x),
    ],
    ids=["detached", "custom backward", "parameter hook", "tells the grad mode"],
)
def test_what_an_engine_would_drop_is_left_to_one_that_does_not(make):
    """A hook, a custom backward pass, a region without gradient: auto gives what plain autograd gives."""
    model = make()
    grad_fn = clipped_grad(model, cross_entropy, clipping_norm=1e3, rescale_to_unit_norm=False, augmult=3)
    out = grad_fn(IMAGES[:, None].repeat(1, 3, 1, 1, 1), TARGETS).grad_sum
    cross_entropy(model(IMAGES), TARGETS).sum().backward()
    true = {name: value.grad for name, value in model.named_parameters()}
    assert distance(out, true) < 1e-4 * (1 + norm(true))


class Taken(torch.autograd.Function):
    """As it is mostly written: torch.func does not take it."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return -grad


def test_auto_says_why_it_took_a_slower_engine():
    grad_fn, _ = run(net(Taken.apply))
    assert grad_fn.engine == "reference"
    assert 'engine "graph" gives other gradients' in grad_fn.refusal and 'engine "func" fails' in grad_fn.refusal
    with pytest.raises(InputError, match='^engine "func"'):
        run(net(Taken.apply), "func")


@pytest.mark.parametrize(
    "middle",
    [
        lambda x: x + torch.ones(4, 1, 1),  # a constant of another type than float64
        lambda x: x.float() * 2,  # not in double precision throughout
        lambda x: torch.where(x.detach() > 0, x, 0.5 * x),
        nn.Dropout(0.5),
        nn.GroupNorm(2, 4),
    ],
)
def test_ordinary_models_train(middle):
    model = net(middle)
    grad_fn = clipped_grad(model, cross_entropy, clipping_norm=1.0)
    assert grad_fn(IMAGES, TARGETS, key=bytes(32), example_ids=torch.arange(4)).grad_norms.all()


def test_models_that_take_pixels_alone_are_checked_on_pixels():
    def only_pixels(x):
        torch._assert(bool((x >= 0).all() & (x <= 1).all()), "pixels")
        return x

    grad_fn = clipped_grad(nn.Sequential(Do(only_pixels), net()), cross_entropy, clipping_norm=1.0)
    grad_fn.prepare(IMAGES, TARGETS)
    with pytest.raises(InputError, match="fails on made-up images of shape"):
        clipped_grad(net(lambda x: x.unflatten(1, (3, 3))), cross_entropy, clipping_norm=1.0)(IMAGES, TARGETS)


class Experts(nn.Module):
    """Of which one image reaches one."""

    def __init__(self, reachable):
        super().__init__()
        self.reachable = reachable
        self.gate, self.experts = nn.Linear(64, reachable), nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x):
        flat = x.flatten(1)
        scores, out = self.gate(flat).softmax(1), torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows = (scores.argmax(1) == number).nonzero()[:, 0]
            if len(rows):
                out = out.index_put((rows,), expert(flat[rows]) * scores[rows, number, None])
        return out.view_as(x)


def test_an_expert_that_no_image_reaches_is_refused_by_name():
    run(net(Experts(3)))
    with pytest.raises(InputError, match="'1.experts.2.(weight|bias)' receives no gradient"):
        run(net(Experts(2)))


@pytest.mark.parametrize(
    "fault", ["norms too short", "a gradient of zero", "one place counts twice", "rounded on the way"]
)
def test_planted_faults_are_seen(fault, monkeypatch):
    """Each in the real engine, where it would break the bound or the sum."""
    if fault == "norms too short":
        true = MaterializedGrads.square_norms
        monkeypatch.setattr(MaterializedGrads, "square_norms", lambda self: (0.99 * true(self)[0], true(self)[1]))
    elif fault == "a gradient of zero":
        bias = METHODS["bias"]
        zero = lambda record, argument: MaterializedGrads(0 * bias(record, argument).written_out())  # noqa: E731
        monkeypatch.setitem(METHODS, "bias", zero)
    elif fault == "one place counts twice":

        class Twice(BUILDERS["graph"]):
            def clipped_sum(self, coefficient, evaluated, batch):
                inputs = batch.inputs.clone()
                inputs[3:4] = 2 * inputs[3:4]
                return super().clipped_sum(coefficient, evaluated, batch.like((inputs, *batch.tensors[1:])))

        monkeypatch.setitem(BUILDERS, "graph", Twice)
    else:
        whole = MaterializedGrads.weighted_sum

        def rounded(rows, coefficients):
            total = whole(rows, coefficients)
            return total if total.dtype == torch.float64 else 1.001 * total

        monkeypatch.setattr(MaterializedGrads, "weighted_sum", rounded)
    with pytest.raises(InputError, match="other gradients|rounds too much"):
        run(net(), "graph")


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_a_network_may_round_as_plain_autograd_does_and_no_more(scale, monkeypatch):
    """Deep networks of ReLUs do: WRN-40-4 in bfloat16, by half of the sum."""
    monkeypatch.setitem(engine_check._SUM, "bf16", 0.0)
    whole = MaterializedGrads.weighted_sum

    def scaled(rows, coefficients):
        total = whole(rows, coefficients)
        return total if total.dtype == torch.float64 else scale * total

    monkeypatch.setattr(MaterializedGrads, "weighted_sum", scaled)
    refused = pytest.raises(InputError, match="the sum differs from that in float64 by 0.2")
    with nullcontext() if scale == 1 else refused:
        run(net(), "graph", precision="bf16")


def test_the_check_sees_shapes_alone():
    check = EngineCheck(net(), cross_entropy, IMAGES[:1], (TARGETS[:0],), 1)
    other = EngineCheck(net(), cross_entropy, 100 + IMAGES[1:2], (TARGETS[:0],), 1)
    assert torch.equal(check.expect().norms, other.expect().norms)


def test_made_up_images_and_targets():
    row = torch.zeros(1, 3, 4, 4)
    images = made_up_images(3, 2, row, 0)
    assert images.shape == (3, 2, 3, 4, 4) and torch.equal(images, made_up_images(3, 2, row, 0))
    pixels = made_up_images(3, 1, row, 0, only_pixels=True)
    assert pixels.min() >= 0 and pixels.max() <= 1
    whole = made_up_images(2, 1, torch.zeros(1, 5, dtype=torch.int64), 0)
    assert whole.dtype == torch.int64 and 0 <= whole.min() and whole.max() <= 1
    like = (torch.zeros(0, dtype=torch.int64), torch.zeros(0, 7))
    classes, shares = made_up_targets(50, 2, like, torch.zeros(1, 7), 0)
    assert classes.shape == (50, 2) and set(classes.flatten().tolist()) == set(range(7))
    assert torch.equal(classes[:, 0], classes[:, 1])
    torch.testing.assert_close(shares.sum(2), torch.ones(50, 2))


def test_temporary_values_give_every_tensor_its_own_memory_back():
    model = net(nn.BatchNorm2d(4))
    model[0].weight.grad = torch.ones_like(model[0].weight)
    before = [(value, value.data_ptr(), value.detach().clone()) for value in [*model.parameters(), *model.buffers()]]
    with pytest.raises(ValueError), temporary_values(model, torch.float64, 1):
        assert model[0].weight.dtype == torch.float64 and model[0].weight.grad is None
        assert not torch.equal(model[0].weight.float(), before[0][2])
        model.eval()
        model[0].weight.data.zero_()
        model[1].running_mean = torch.zeros(1)
        raise ValueError
    assert all(value.data_ptr() == place and torch.equal(value, held) for value, place, held in before)
    assert model.training and model[0].weight.grad.all() and len(model[1].running_mean) == 4
