"""What is checked before a private image is seen, and with what: the zoo (tests/clipping/zoo) says what it finds."""

import contextlib
import dataclasses
import functools
import itertools
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sfumato import config
from sfumato.clipping import clipped_grad, pure
from sfumato.clipping.law import Law
from sfumato.clipping.stand_in import Snapshot, stand_in
from sfumato.errors import InputError
from tests.clipping.problems import cross_entropy

ENGINES = ["graph", "func", "reference"]


SEEN = []  # no attribute: those are put back


class Watched(nn.Module):
    """Tells what its forward pass is given."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        SEEN.append(x)
        return self.layer(x)


def test_what_is_checked_does_not_depend_on_the_images():
    seen = []
    for fill in (12345.0, float("nan")):
        model = Watched()
        clipped_grad(model, cross_entropy, clipping_norm=1.0, engine="graph")(
            torch.full((3, 4), fill), torch.tensor([2, 2, 2])
        )
        seen.append([x.detach() for x in SEEN if type(x) is torch.Tensor])
        SEEN.clear()
    assert len(seen[0]) == len(seen[1]) > 5
    assert all(torch.equal(one, other) for one, other in zip(*seen, strict=True))


def test_targets_are_made_up_for_the_checks():
    calls = itertools.count()

    def watched(outputs, targets):
        assert next(calls) >= 8 or (targets >= 0).all()
        return cross_entropy(outputs, targets)

    clipped_grad(nn.Linear(4, 9), pure(watched), clipping_norm=1.0, engine="reference")(
        torch.zeros(3, 4), torch.full((3,), -100)
    )  # none a class
    assert next(calls) > 8


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_standing_in_gives_every_tensor_its_own_memory_back(dtype):
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[2].weight = nn.Parameter(model[2].weight.detach(), requires_grad=False)
    tensors = [*model.parameters(), *model.buffers()]
    model[0].weight.grad = torch.ones(3, 4)
    where, before = [tensor.data_ptr() for tensor in tensors], Snapshot.of(model)
    with pytest.raises(KeyboardInterrupt), stand_in(model, dtype, shift_seed=3):
        assert before.changed(model)
        assert not torch.equal(model[2].weight.float(), before.tensors["2", "weight"])  # a frozen one moves as well
        model(torch.randn(5, 4, dtype=dtype)).sum().backward()
        model[2].weight.data = torch.zeros(1)
        model[2].weight.requires_grad_(True)
        model[0].register_buffer("cache", torch.ones(2))
        model.add_module("late", nn.Linear(1, 1))
        model.eval()
        raise KeyboardInterrupt
    assert before.changed(model) is None and [tensor.data_ptr() for tensor in tensors] == where
    assert torch.equal(model[0].weight.grad, torch.ones(3, 4)) and model[0].bias.grad is None and len(model) == 3


@pytest.mark.parametrize(
    ("values", "moves"), [(1000 * torch.arange(4096.0), 118_242), (torch.zeros(4096), 0.1), (torch.empty(0, 3), 0.0)]
)
def test_parameters_move_by_a_tenth_of_their_spread_and_by_a_tenth_where_they_have_none(values, moves):
    """Enough that nothing hides behind zeros, and not so much that what a network computes with such weights is
    something else.
    """
    model = nn.ParameterList([nn.Parameter(values.clone())])
    with stand_in(model, None, shift_seed=3):
        moved = (model[0].detach() - values).square().sum().div(max(values.numel(), 1)).sqrt().item()
    assert moved == pytest.approx(moves, rel=0.1)


class Turning(nn.Module):
    """Computes something else once it is told to."""

    def __init__(self):
        super().__init__()
        self.layer, self.turned = nn.Linear(4, 3), False

    def forward(self, x):
        return self.layer(-x if self.turned else x)


@pytest.mark.parametrize("engine", ["graph", "func"])
def test_a_model_that_computes_otherwise_later_is_found_when_it_is_verified(engine):
    model = Turning()
    grad_fn = clipped_grad(model, cross_entropy, clipping_norm=1.0, engine=engine)
    grad_fn(torch.randn(3, 4), torch.tensor([0, 1, 2]))
    grad_fn.verify(1)
    model.turned = True
    if engine == "graph":  # which computes what it traced
        with pytest.raises(InputError, match='"graph" gives other gradients than plain autograd'):
            grad_fn.verify(2)
    else:
        grad_fn.verify(2)
    with torch.no_grad():
        model.layer.weight.zero_()
    model.turned = False
    grad_fn.verify(3)


@pytest.mark.parametrize("engine", ["graph", "func", "reference"])
def test_a_device_that_adds_up_in_another_order_each_time_is_no_memory(engine, monkeypatch):
    """A bias before a norm of one channel receives what roundings leave of zero: no digit of it is the same again."""
    single, generator = Law._single, torch.Generator().manual_seed(0)

    def on_such_a_device(law, *args):
        found = single(law, *args)
        largest = max(float(grad.abs().max()) for grad in found.grads.values())
        grads = {
            name: grad + 1e-15 * largest * torch.randn(grad.shape, generator=generator, dtype=grad.dtype)
            for name, grad in found.grads.items()
        }
        return dataclasses.replace(found, grads=grads)

    monkeypatch.setattr(Law, "_single", on_such_a_device)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(4, 4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))
    grad_fn = clipped_grad(model, cross_entropy, clipping_norm=1.0, engine=engine)
    grad_fn(torch.randn(3, 1, 5, 5), torch.arange(3))


class RemembersBatches(nn.Module):
    """Keeps something of several images at once, never of one alone."""

    def __init__(self):
        super().__init__()
        self.layer, self.kept = nn.Linear(4, 3), torch.zeros(())

    def forward(self, x):
        out = self.layer(x) + self.kept
        if len(x) > 1:
            self.kept = x.detach().mean()
        return out


class CountsBackwardPasses(nn.Module):
    """Its outputs tell nothing; its gradients grow from call to call."""

    def __init__(self):
        super().__init__()
        self.layer, self.count = nn.Linear(4, 3), 0
        self.layer.weight.register_hook(self.grown)

    def grown(self, grad):
        self.count += 1
        return grad * (1 + self.count / 10)

    def forward(self, x):
        return self.layer(x)


@pytest.mark.parametrize("engine", ["auto", *ENGINES])
@pytest.mark.parametrize("model", [RemembersBatches, CountsBackwardPasses])
def test_what_a_model_remembers_of_batches_or_shows_in_gradients_alone_is_told_as_memory(model, engine):
    with pytest.raises(InputError, match="another result after other images"):
        clipped_grad(model(), lambda outputs: outputs.square().sum(1), clipping_norm=1.0, engine=engine)(
            torch.randn(3, 4)
        )


@pytest.mark.parametrize("engine", ENGINES)
def test_tiny_clipping_norms_are_refused(engine):
    """From the square of 1e-23 on, norms in float32 are zero, and nothing would be clipped."""
    with pytest.raises(InputError, match="at least 1e-12"):
        clipped_grad(nn.Linear(4, 3), cross_entropy, clipping_norm=9.9e-13, engine=engine)
    with pytest.raises(InputError, match="privacy.clipping_norm"):
        config.parse({"data": {"name": "digits"}, "privacy": {"clipping_norm": 9.9e-13}})
    model = nn.Linear(4000, 3).requires_grad_(True)
    grad_fn = clipped_grad(model, lambda outputs: 1e-8 * outputs.sum(1), clipping_norm=1e-12, engine=engine)
    out = grad_fn(torch.randn(2, 4000))
    total = torch.stack([value.double().square().sum() for value in out.grad_sum.values()]).sum().sqrt()
    assert 1 < total <= 2 * (1 + 1e-5)


class NarrowInside(nn.Module):
    """Rounds to float32 inside, whatever it is given."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 8, 3), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(self.first(x).float().relu().mean((2, 3)).to(x.dtype))


class SinglePrecisionOnly(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.constant = nn.Linear(16, 3), torch.randn(16, 16)

    def forward(self, x):
        return self.layer(torch.relu(x.flatten(1) @ self.constant))


@pytest.mark.parametrize("model", [NarrowInside(), SinglePrecisionOnly()], ids=["casts", "constants"])
@pytest.mark.parametrize("engine", ["auto", *ENGINES])
def test_models_that_do_not_run_in_double_precision_are_checked_as_they_are(engine, model):
    grad_fn = clipped_grad(model, cross_entropy, clipping_norm=1.0, engine=engine)
    inputs, targets = torch.randn(5, 1, 4, 4), torch.arange(5) % 3
    norms = grad_fn(inputs, targets).grad_norms
    for i in range(5):
        model.zero_grad()
        cross_entropy(model(inputs[i : i + 1]), targets[i : i + 1]).sum().backward()
        norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
        assert norms[i] == pytest.approx(norm.item(), rel=1e-4)
    model.zero_grad()


def test_a_hook_on_a_layer_behind_zeros_is_not_lost():
    """With the head as it is, nothing of what lies before it shows."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    nn.init.zeros_(model[2].weight)
    model[0].weight.register_hook(lambda grad: -grad)
    batch = torch.randn(2, 4), torch.tensor([0, 1])
    for engine in ("graph", "func"):
        with pytest.raises(InputError, match="at '0' .Linear. or before it.*engine=\"reference\""):
            clipped_grad(model, cross_entropy, clipping_norm=1.0, engine=engine)(*batch)
    grad_fn = clipped_grad(model, cross_entropy, clipping_norm=1.0)
    assert grad_fn(*batch).grad_norms.all() and grad_fn.engine == "reference"


@pytest.mark.parametrize("angle", [1e-4, 1e-3])
def test_a_gradient_that_is_turned_by_a_small_angle_is_not_lost(angle):
    """Its norm tells nothing. Single precision alone would not tell a turn of 1e-4 from rounding."""

    def turned(grad):
        pairs = grad.view(-1, 2)
        return grad + angle * torch.stack([-pairs[:, 1], pairs[:, 0]], 1).view_as(grad)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 3))
    model[0].weight.register_hook(turned)
    with pytest.raises(InputError, match="other gradients than plain autograd"):
        clipped_grad(model, cross_entropy, clipping_norm=1.0, engine="graph")(torch.randn(2, 4), torch.tensor([0, 1]))


@pytest.mark.parametrize("engine", ["auto", *ENGINES])
def test_lazy_layers_are_refused(engine):
    with pytest.raises(InputError, match="gets its shape from the first images"):
        clipped_grad(nn.LazyLinear(3), cross_entropy, clipping_norm=1.0, engine=engine)(
            torch.randn(2, 4), torch.tensor([0, 1])
        )


@pytest.mark.parametrize("engine", ["graph", "func"])
def test_a_hook_that_comes_later_is_seen(engine):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    grad_fn = clipped_grad(model, cross_entropy, clipping_norm=1.0, engine=engine)
    batch = torch.randn(2, 4), torch.tensor([0, 1])
    before = grad_fn(*batch).grad_norms
    handle = model[0].weight.register_hook(lambda grad: -grad)
    with pytest.raises(InputError, match="gives other gradients"):
        grad_fn(*batch)
    handle.remove()
    later = model[1].register_forward_hook(lambda module, args, output: 2 * output)
    assert not torch.allclose(grad_fn(*batch).grad_norms, before)
    later.remove()
    torch.testing.assert_close(grad_fn(*batch).grad_norms, before)


class Scripted(nn.Module):
    """A frozen part of TorchScript under a trainable head."""

    def __init__(self):
        super().__init__()
        self.trunk, self.head = torch.jit.trace(nn.Linear(4, 4), torch.zeros(1, 4)), nn.Linear(4, 3)
        self.trunk.requires_grad_(False)

    def forward(self, x):
        return self.head(torch.tanh(self.trunk(x)))


def try_once(model, engine="auto", loss_fn=cross_entropy, **options):
    grad_fn = clipped_grad(model, loss_fn, clipping_norm=1.0, engine=engine, **options)
    return grad_fn, grad_fn(torch.rand(5, 4), torch.arange(5) % 3, key=bytes(32), example_ids=torch.arange(5))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("engine", ["auto", *ENGINES])
def test_parts_of_torchscript_are_left_as_they_were(engine):
    model = Scripted()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with contextlib.suppress(InputError):
        try_once(model, engine)
    assert all(
        torch.equal(before[name], value) and value.dtype == torch.float32 for name, value in model.state_dict().items()
    )


@pytest.mark.parametrize("engine", ["auto", *ENGINES])
def test_hooks_on_the_nodes_that_add_gradients_up_outlive_the_checks(engine):
    """DistributedDataParallel has such hooks."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    accumulators = [parameter.view_as(parameter).grad_fn.next_functions[0][0] for parameter in model.parameters()]
    called = []
    for accumulator in accumulators:
        accumulator.register_hook(lambda *_: called.append(1))
    with contextlib.suppress(InputError):
        try_once(model, engine)
    called.clear()
    model(torch.ones(1, 4)).sum().backward()
    assert len(called) == len(accumulators)


class Remembering(nn.Module):
    """Makes a table when it is first called, and notes what it last saw."""

    def __init__(self):
        super().__init__()
        self.layer, self.table, self.last, self.calls = nn.Linear(4, 3), None, None, []

    def forward(self, x):
        if self.table is None:
            self.table = torch.linspace(0, 1, 4, dtype=x.dtype)
        self.last = x.detach()
        self.calls.append(len(x))
        return self.layer(x + self.table)


@pytest.mark.parametrize("engine", ["auto", "func", "reference"])
def test_attributes_are_what_they_were_and_hold_no_image(engine):
    model = Remembering()
    for _ in range(2):
        try_once(model, engine)
        assert model.table is None and model.last is None and model.calls == []
    model(torch.ones(2, 4))


class LateLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.made, self.layer = False, nn.Linear(4, 3)

    def forward(self, x):
        if not self.made:
            self.made, self.late = True, nn.Linear(4, 4)
        return self.layer(self.late(x))


def test_a_model_that_is_refused_still_works():
    model = LateLayer()
    with pytest.raises(InputError):
        try_once(model)
    assert model(torch.ones(2, 4)).shape == (2, 3)


class ExtraState(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.largest = nn.Linear(4, 3), [0.0]

    def forward(self, x):
        self.largest = [max(self.largest[0], float(x.detach().abs().max()))]
        return self.layer(x)

    def get_extra_state(self):
        return self.largest


@pytest.mark.parametrize("engine", ["auto", "reference"])
def test_extra_state_is_state(engine):
    with pytest.raises(InputError, match="changes its state 'extra state'"):
        try_once(ExtraState(), engine)


class Interrupting(nn.Module):
    """Sends an interrupt at a call of its forward pass."""

    def __init__(self, at):
        super().__init__()
        self.first, self.layer, self.at = nn.Linear(4, 4), nn.Linear(4, 3), at

    def forward(self, x):
        COUNT.append(1)
        if len(COUNT) == self.at:
            signal.raise_signal(signal.SIGINT)
        return self.layer(torch.tanh(self.first(x)))


COUNT = []


@pytest.fixture
def interruptible():
    """A shell starts what runs in the background with interrupts ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("at", range(1, 9))
def test_an_interrupt_leaves_the_model_as_it_was(at):
    model = Interrupting(at)
    before = Snapshot.of(model)
    COUNT.clear()
    with pytest.raises(KeyboardInterrupt):
        try_once(model, "reference")
    assert before.changed(model) is None
    try_once(model)


def test_two_threads_may_make_the_first_call_at_once():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    before = Snapshot.of(model)
    grad_fns = [clipped_grad(model, cross_entropy, clipping_norm=1.0, engine="graph") for _ in range(2)]
    inputs, targets = torch.rand(5, 4), torch.arange(5) % 3

    def norms(grad_fn):
        return grad_fn(inputs, targets).grad_norms

    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            found = list(pool.map(norms, grad_fns[:1] * 4))
            assert all(torch.allclose(norm, found[0]) for norm in found)
    assert before.changed(model) is None


@pytest.mark.parametrize("engine", ["auto", *ENGINES])
def test_whole_numbers_are_drawn_for_each_row(engine):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            return self.layer(x * torch.randint(1, 4, (x.shape[0], 1), device=x.device) + torch.randint_like(x, 3))

    grad_fn, out = try_once(Scaled(), engine)
    assert out.grad_norms.isfinite().all()


@pytest.mark.parametrize("function", [torch.log1p, lambda x: x**0.45, lambda x: torch.log(x + 1e-3)])
@pytest.mark.parametrize("engine", ["auto", *ENGINES])
def test_models_that_take_pixels_alone_are_checked_on_pixels(engine, function):
    class OfPixels(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            return self.layer(function(x))

    _, out = try_once(OfPixels(), engine)
    assert out.grad_norms.isfinite().all() and out.grad_norms.all()


def test_a_loss_of_classes_from_one_on():
    _, out = try_once(
        nn.Linear(4, 3), loss_fn=lambda outputs, targets: cross_entropy(outputs, targets.clamp(min=1) - 1)
    )
    assert out.grad_norms.all()


@pytest.mark.parametrize("engine", ["graph", "func"])
def test_settings_that_change_between_two_calls_are_seen(engine):
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 3))
    grad_fn, dropped = try_once(model, engine)
    model[1].p = 0.0
    batch = torch.rand(5, 4), torch.arange(5) % 3
    torch.testing.assert_close(
        grad_fn(*batch).grad_norms, clipped_grad(model, cross_entropy, clipping_norm=1.0)(*batch).grad_norms
    )


def test_a_lazy_model_is_refused_with_an_empty_batch_too():
    with pytest.raises(InputError, match="gets its shape"):
        clipped_grad(nn.LazyLinear(3), cross_entropy, clipping_norm=1.0)(torch.zeros(0, 4), torch.zeros(0).long())


def test_inference_mode_is_refused_by_name():
    with torch.inference_mode(), pytest.raises(InputError, match="inference_mode"):
        try_once(nn.Linear(4, 3))


def test_as_many_views_as_an_image_has_are_tried_together():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            return self.layer(-x if len(x) > 13 else x)

    with pytest.raises(InputError):
        clipped_grad(Counts(), cross_entropy, clipping_norm=1.0, augmult=16)(torch.rand(2, 16, 4), torch.tensor([0, 1]))


@functools.lru_cache
def table(count, dtype):
    return torch.linspace(0, 1, count, dtype=dtype)


def test_tables_outside_of_the_model_are_not_left_empty():
    class Coded(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            return self.layer(x + table(4, x.dtype))

    table.cache_clear()
    model = Coded()
    try_once(model, "graph")
    assert type(table(4, torch.float32)) is torch.Tensor and type(model(torch.ones(1, 4))) is torch.Tensor


@pytest.mark.parametrize("change", ["stride", "function", "dictionary", "list", "forward", "class"])
def test_every_kind_of_setting_is_seen(change):
    class Set(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.layer = nn.Conv1d(1, 4, 2), nn.LazyLinear(3)
            self.act, self.settings, self.active = F.relu, {"scale": 1.0}, [1]

        def forward(self, x):
            return self.layer(self.act(self.conv(x[:, None])).mean(2) * self.settings["scale"] * len(self.active))

    class Other(Set):
        def forward(self, x):
            return -super().forward(x)

    torch.manual_seed(0)
    model = Set()
    model(torch.ones(1, 4))
    grad_fn, _ = try_once(model, "graph")
    changes = {
        "stride": lambda: setattr(model.conv, "stride", (2,)),
        "function": lambda: setattr(model, "act", F.gelu),
        "dictionary": lambda: model.settings.update(scale=3.0),
        "list": lambda: model.active.append(2),
        "forward": lambda: setattr(model, "forward", lambda x: -Set.forward(model, x)),
        "class": lambda: setattr(model, "__class__", Other),
    }
    changes[change]()
    batch = torch.rand(5, 4), torch.arange(5) % 3
    expected = clipped_grad(model, cross_entropy, clipping_norm=1.0, engine="reference")(*batch).grad_norms
    torch.testing.assert_close(grad_fn(*batch).grad_norms, expected)


class NotesFeatures(nn.Module):
    """Keeps what it last saw, and a table that it once filled."""

    def __init__(self):
        super().__init__()
        self.layer, self.last, self.filled = nn.Linear(4, 3), None, torch.zeros(4)

    def forward(self, x):
        self.last = x * 2
        if torch.is_inference_mode_enabled():
            self.filled = x.mean(0).detach()
        return self.layer(x)


@pytest.mark.parametrize("engine", ["auto", *ENGINES])
@pytest.mark.parametrize("when", ["before", "between"])
def test_features_noted_in_inference_mode_stand_in_nobody_s_way(when, engine):
    """PyTorch keeps no count of what is written to such tensors."""
    model = NotesFeatures()
    grad_fn = clipped_grad(model, cross_entropy, clipping_norm=1.0, engine=engine)
    batch = torch.rand(3, 4), torch.arange(3)
    expected = clipped_grad(model, cross_entropy, clipping_norm=1.0, engine="reference")(*batch).grad_norms
    if when == "between":
        grad_fn(*batch)
    for _ in range(2):
        with torch.inference_mode():
            model(torch.ones(2, 4))
        kept = model.last
        torch.testing.assert_close(grad_fn(*batch).grad_norms, expected)
        assert model.last is kept and torch.equal(kept, torch.full((2, 4), 2.0))


def test_an_attribute_of_inference_mode_that_was_written_to_is_put_back():
    model = NotesFeatures()
    with torch.inference_mode():
        model(torch.ones(2, 4))
    with stand_in(model, None, None), torch.inference_mode():
        model.filled.mul_(5)
    assert torch.equal(model.filled, torch.ones(4))
