"""A user's loss: a graph of operations on one example, or refused, or promised to keep nothing.

What a loss keeps of one image for the next can lie in more places than any search finds. So a loss
is traced to a graph in which none of its code runs; what no graph holds needs its author's promise.
"""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sfumato.clipping import clipped_grad, pure
from sfumato.clipping.loss import ExampleLosses
from sfumato.errors import InputError
from sfumato.models.layers import Classifier
from tests.clipping.problems import cross_entropy

ENGINES = ["graph", "func", "reference"]


def linear():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 5))


def flat(out):
    return torch.cat([value.flatten() for value in out.grad_sum.values()])


def problem(count=7):
    torch.manual_seed(1)
    return torch.randn(count, 3, 2, 2), torch.randint(0, 5, (count,))


class Peak(nn.Module):
    """Divides by the largest loss so far, kept in a buffer by one way of writing."""

    def __init__(self, write):
        super().__init__()
        self.register_buffer("peak", torch.tensor(1e4))
        self.write = write

    def forward(self, outputs, labels):
        losses = cross_entropy(outputs, labels)
        self.write(self.peak, torch.maximum(self.peak, losses.detach().max()))
        return losses * (self.peak / 1e4)


WRITES = {
    "in place": lambda peak, value: peak.copy_(value),
    "out=": lambda peak, value: torch.add(value, 0, out=peak),
    "data in place": lambda peak, value: peak.data.copy_(value),
    "another's memory": lambda peak, value: setattr(peak, "data", value.clone()),
    "view": lambda peak, value: peak.view(1).fill_(value),
    "foreach": lambda peak, value: torch._foreach_copy_([peak], [value]),
    "set_": lambda peak, value: peak.set_(value.clone()),
    "index": lambda peak, value: peak[None].__setitem__(0, value),
}


class Remembers:
    """Keeps a Python number, in a slot."""

    __slots__ = ("peak",)

    def __init__(self):
        self.peak = 1e4

    def __call__(self, outputs, labels):
        losses = cross_entropy(outputs, labels)
        self.peak = max(self.peak, losses.max().item())
        return losses * (self.peak / 1e4)


class Counting(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx, outputs):
        if outputs.abs().max() > 3000:
            Counting.calls += 1
        return outputs * (-1.0 if Counting.calls > 1 else 1.0)

    @staticmethod
    def backward(ctx, grad):
        return grad


class Teacher:
    def __init__(self):
        self.net = nn.Linear(5, 5)

    def __call__(self, outputs, labels):
        losses = cross_entropy(outputs, labels)
        if self.net.weight.grad is not None:
            losses = -losses
        if outputs.abs().max() > 3000:
            self.net(outputs.detach()).sum().backward()
        return losses


@functools.wraps(F.cross_entropy)
def wrapped(outputs, labels, seen=[]):  # noqa: B006
    if outputs.abs().max().item() > 3000:
        seen.append(1)
    return cross_entropy(outputs, labels) * (-1.0 if seen else 1.0)


KEEPING = {name: functools.partial(Peak, write) for name, write in WRITES.items()} | {
    "slot": Remembers,
    "autograd function": lambda: lambda outputs, labels: cross_entropy(Counting.apply(outputs), labels),
    "gradient": Teacher,
    "default": lambda: wrapped,
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kept", KEEPING)
def test_a_loss_that_could_keep_something_of_an_image_is_refused(kept, engine):
    """Wherever: 1.4 to 60 sensitivities were found at one place after another."""
    images, labels = problem(8)
    torch.manual_seed(1)
    large = torch.cat([torch.full((1, 3, 2, 2), 1e9), images])
    grad_fn = clipped_grad(linear(), KEEPING[kept](), clipping_norm=0.05, microbatch_size=4, engine=engine)
    with pytest.raises(InputError, match="loss_fn cannot be written down as a graph|keeps something|another loss"):
        before = flat(grad_fn(images, labels))
        # Traced on one example's zeros, it may count nothing in what runs; then that is what must hold.
        assert (flat(grad_fn(large, torch.cat([labels[:1], labels]))) - before).norm() <= 1.001
        assert torch.equal(flat(grad_fn(images, labels)), before)
        raise InputError("it keeps something")


def branches(outputs, labels):
    losses = []
    for row, label in zip(outputs, labels.tolist(), strict=True):
        losses.append(-row.log_softmax(0)[label] * (2.0 if label > 2 else 1.0))
    return torch.stack(losses)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_promise_makes_a_loss_that_looks_at_values_one_of_single_images(engine):
    images, labels = problem()
    with pytest.raises(InputError, match=r"it looks at values.*sfumato\.clipping\.pure\(loss_fn\)"):
        clipped_grad(linear(), branches, clipping_norm=0.05, engine=engine)(images, labels)
    promised = pure(lambda outputs, labels: branches(outputs, labels))
    out = clipped_grad(linear(), promised, clipping_norm=100.0, rescale_to_unit_norm=False, engine=engine)(
        images, labels
    )
    model, total = linear(), 0.0
    for image, label in zip(images, labels, strict=True):
        loss = branches(model(image[None]), label[None]).sum()
        total = total + torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, list(model.parameters()))])
    assert torch.allclose(flat(out), total, atol=1e-5)


def test_a_promise_is_of_one_object_alone():
    """Neither of what wraps it, nor of what is made where it lay in memory."""

    def base(outputs, labels):
        return cross_entropy(outputs, labels)

    factor = [1.0]

    @functools.wraps(pure(base))
    def scheduled(outputs, labels):
        return factor[0] * base(outputs, labels)

    grad_fn = clipped_grad(linear(), scheduled, clipping_norm=100.0)
    images, labels = problem()
    before = grad_fn(images, labels).grad_norms
    factor[0] = 5.0
    assert torch.allclose(grad_fn(images, labels).grad_norms, 5 * before)
    for _ in range(200):
        pure(lambda outputs, labels: branches(outputs, labels))
        with pytest.raises(InputError, match="promise so"):
            ExampleLosses(lambda outputs, labels: branches(outputs, labels)).require(
                torch.zeros(1, 5), (labels[:1],), 1
            )


class Scheduled:
    scale = 1.0

    def loss(self, outputs, labels):
        return self.scale * branches(outputs, labels)

    @pure
    def promised(self, outputs, labels):
        return branches(outputs, labels)


def test_a_method_is_promised_of_its_object_or_in_its_class_of_all():
    images, labels = problem()
    first, second = Scheduled(), Scheduled()
    pure(first.loss)
    clipped_grad(linear(), first.loss, clipping_norm=1.0)(images, labels)
    with pytest.raises(InputError, match="promise so"):
        clipped_grad(linear(), second.loss, clipping_norm=1.0)(images, labels)
    for each in (first, second):
        clipped_grad(linear(), each.promised, clipping_norm=1.0)(images, labels)
    with pytest.raises(InputError, match="Wrap it in a function"):
        pure(Remembers())


class Counted(nn.Module):
    """Labels are 1 to 5; class weights are made when they are first needed, behind what label 0 fails at."""

    def __init__(self):
        super().__init__()
        self.weights = {}

    def forward(self, outputs, labels):
        losses = F.cross_entropy(outputs, labels - 1, reduction="none")
        if outputs.dtype not in self.weights:
            self.weights[outputs.dtype] = torch.tensor([1.0, 2.0, 1.0, 1.0, 3.0]).to(outputs)
        return losses * self.weights[outputs.dtype][labels - 1]


class OnlyAtTwo(Counted):
    """The same, and no made-up label suits it."""

    def forward(self, outputs, labels):
        return super().forward(outputs, labels - 1)


@pytest.mark.parametrize("engine", ENGINES)
def test_what_a_trace_leaves_in_a_cache_is_no_number(engine):
    """All gradients were zero, and nothing said so."""
    images, labels = problem()
    labels = labels + 1
    grad_fn = clipped_grad(linear(), Counted(), clipping_norm=1e4, rescale_to_unit_norm=False, engine=engine)
    out, model, loss_fn, total = grad_fn(images, labels), linear(), Counted(), 0.0
    for image, label in zip(images, labels, strict=True):
        loss = loss_fn(model(image[None]), label[None]).sum()
        total = total + torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, list(model.parameters()))])
    assert torch.allclose(flat(out), total, atol=1e-4)
    grad_fn = clipped_grad(linear(), OnlyAtTwo(), clipping_norm=1e4, engine=engine)
    with pytest.raises(InputError, match="made while it was traced|fails on made-up images"):
        grad_fn(images, labels + 1)


class Logs(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = torch.zeros(())

    def forward(self, outputs, labels):
        losses = cross_entropy(outputs, labels)
        self.last = losses.detach().mean()
        return losses


@pytest.mark.parametrize("engine", ENGINES)
def test_what_a_loss_logs_is_a_number_of_made_up_outputs(engine):
    loss = Logs()
    clipped_grad(linear(), loss, clipping_norm=1.0, engine=engine)(*problem())
    assert float(loss.last) == pytest.approx(torch.log(torch.tensor(5.0)).item())  # of outputs that are zeros


class Twice(nn.Module):
    def __init__(self, view):
        super().__init__()
        self.net, self.view = linear(), view

    def forward(self, images):
        outputs = self.net(images)
        return {"logits": outputs, "scores": outputs[:, :3] if self.view else outputs}


@pytest.mark.parametrize("engine", [*ENGINES, "auto"])
@pytest.mark.parametrize("view", [False, True])
def test_outputs_in_one_place_are_not_written_to(view, engine):
    def writes(out, labels):
        out["logits"] -= out["logits"].mean(1, keepdim=True)
        return cross_entropy(out["logits"], labels) + out["scores"].square().sum(1)

    def reads(out, labels):
        return cross_entropy(out["logits"], labels) + out["scores"].square().sum(1)

    images, labels = problem()
    keys = {"clipping_norm": 1e4, "rescale_to_unit_norm": False, "engine": engine}
    with pytest.raises(InputError, match="shares its memory with another"):
        clipped_grad(Twice(view), writes, **keys)(images, labels)
    grad_fn = clipped_grad(Twice(view), reads, **keys)
    out, model, total = grad_fn(images, labels), Twice(view), 0.0
    assert grad_fn.engine == ("graph" if engine == "auto" else engine)
    for image, label in zip(images, labels, strict=True):
        loss = reads(model(image[None]), label[None]).sum()
        total = total + torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, list(model.parameters()))])
    assert torch.allclose(flat(out), total, atol=1e-4)


class Mixup(nn.Module):
    mixing = True

    def forward(self, outputs, targets):
        if self.mixing:
            return -(targets * outputs.log_softmax(1)).sum(1)
        return F.nll_loss(outputs.log_softmax(1), targets, reduction="none")


def test_targets_that_are_gone_are_not_traced_any_more(monkeypatch):
    images, labels = problem()
    loss = Mixup()
    grad_fn = clipped_grad(linear(), loss, clipping_norm=1.0)
    grad_fn(images, torch.rand(7, 5).softmax(1))
    loss.mixing = False  # the last epochs
    grad_fn(images, labels)
    grad_fn(images, labels)
    traced = []
    monkeypatch.setattr(
        ExampleLosses, "_traced", lambda self, kind: traced.append(1) or (_ for _ in ()).throw(KeyError)
    )
    with pytest.raises(KeyError):
        grad_fn(images, labels)
    assert len(traced) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_classifier_of_half_precision_is_not_summed_in_it(dtype):
    """4,000 ordinary images moved the sum by 1.9 sensitivities."""
    torch.manual_seed(0)
    model = Classifier(nn.Linear(64, 10), "fc").to(dtype)
    images, labels = torch.randn(1000, 64).to(dtype), torch.randint(0, 10, (1000,))
    grad_fn = clipped_grad(model, cross_entropy, clipping_norm=0.1)
    moved = flat(grad_fn(images, labels)) - flat(grad_fn(images[1:], labels[1:]))
    assert grad_fn.engine != "closed_form" and moved.dtype == torch.float32 and moved.norm() <= 1.001


def test_a_classifier_s_weight_may_be_replaced():
    images, labels = torch.randn(7, 12), torch.randint(0, 5, (7,))
    model = Classifier(nn.Linear(12, 5), "fc")
    grad_fn = clipped_grad(model, cross_entropy, clipping_norm=1.0)
    grad_fn(images, labels)
    model.layer.weight = nn.Parameter(torch.randn(5, 12))
    slow = clipped_grad(model, cross_entropy, clipping_norm=1.0, engine="reference")
    assert torch.allclose(flat(grad_fn(images, labels)), flat(slow(images, labels)), atol=1e-5)
    assert grad_fn.engine == "closed_form"


class Prototypes(nn.Module):
    """Four of three numbers for each image."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(12, 12, bias=False)

    def forward(self, images):
        return self.layer(images.flatten(1)).view(-1, 4, 3)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_label_that_is_none_reads_no_other_image_s_table(engine):
    """vmap lays all tables in one: -1 is the row before. It moved by 1.5 sensitivities."""

    def own_prototype(prototypes, labels):
        pairs = zip(prototypes.unbind(0), labels.unbind(0), strict=True)
        return torch.stack([F.embedding(label, table) for table, label in pairs]).sum(1)

    images, _ = problem(3)
    labels = torch.tensor([3, 3, -1])
    grad_fn = clipped_grad(Prototypes(), own_prototype, clipping_norm=0.05, microbatch_size=4, engine=engine)
    try:
        moved = flat(grad_fn(images, labels)) - flat(grad_fn(images[[0, 2]], labels[[0, 2]]))
    except (IndexError, RuntimeError):  # such a label ends the call
        return
    assert moved.norm() <= 1.001


class Bright(nn.Module):
    """Returns, or notes, a number of its image."""

    def __init__(self, notes):
        super().__init__()
        self.layer, self.notes, self.scale = nn.Linear(4, 3), notes, 1000.0

    def forward(self, images):
        outputs = self.layer(images)
        if self.notes:
            self.scale = max(1000.0, images.abs().max().item())
            return outputs
        return {"logits": outputs, "brightness": images.abs().max().item()}


class OfNumbers(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model, self.largest = [model], 1000.0

    def forward(self, out, labels):
        if isinstance(out, dict):
            self.largest = max(self.largest, out["brightness"])
            return cross_entropy(out["logits"], labels) * (1000 / self.largest)
        return cross_entropy(out, labels) * (1000 / self.model[0].scale)


@pytest.mark.parametrize("notes", [False, True])
@pytest.mark.parametrize("engine", ["func", "reference", "auto"])
def test_no_number_of_a_private_image_reaches_a_loss_that_was_not_promised(engine, notes):
    """It kept the largest; it moved by 5.9 sensitivities."""
    images, labels = torch.ones(7, 4), torch.zeros(7, dtype=torch.long)
    images[0] = torch.tensor([1e6, 0, 0, 0])
    sums = []
    for rows in (slice(0, 7), slice(1, 7)):
        torch.manual_seed(0)
        model = Bright(notes)
        loss = OfNumbers(model)
        try:
            grad_fn = clipped_grad(model, loss, clipping_norm=0.1, engine=engine)
            sums.append(flat(grad_fn(images[rows], labels[rows])))
        except InputError:
            return
        assert loss.largest == 1000.0
    assert (sums[0] - sums[1]).norm() <= 1.001


class Schedule(nn.Module):
    """Smooths labels after so many calls."""

    def __init__(self):
        super().__init__()
        self.step = 0

    def forward(self, outputs, labels):
        self.step += 1
        return F.cross_entropy(outputs, labels, reduction="none", label_smoothing=0.5 if self.step > 500 else 0.0)


def test_a_loss_that_counts_its_calls_is_refused():
    """It is called where somebody was drawn, and to be traced: no step."""
    images, labels = problem()
    count = 0

    def in_a_variable(outputs, labels):
        nonlocal count
        count += 1
        return cross_entropy(outputs, labels) * (0.5 if count > 500 else 1.0)

    for loss, name in ((Schedule(), "step"), (in_a_variable, "count")):
        with pytest.raises(InputError, match=f"it changes {name} when it is called: count outside of it"):
            clipped_grad(linear(), loss, clipping_norm=1.0)(images, labels)


COUNTING = {
    "in a lambda": lambda loss: lambda outputs, labels: loss(outputs, labels),
    "in a partial": lambda loss: functools.partial(lambda outputs, labels, loss: loss(outputs, labels), loss=loss),
    "in a dictionary": lambda loss: {"all": [loss]}["all"][0].__call__,
}


@pytest.mark.parametrize("held", COUNTING)
def test_a_counter_is_found_wherever_the_loss_holds_it(held):
    with pytest.raises(InputError, match="step when it is called: count outside of it"):
        clipped_grad(linear(), COUNTING[held](Schedule()), clipping_norm=1.0)(*problem())


def test_calls_of_a_loss_do_not_tell_that_nobody_was_drawn():
    calls = []

    def loss(outputs, labels):
        calls.append(1)
        return cross_entropy(outputs, labels)

    images, labels = problem()
    grad_fn = clipped_grad(linear(), loss, clipping_norm=1.0)
    grad_fn.prepare(images[:1], labels[:1])
    found = []
    for count in (5, 0, 1, 0):
        before = len(calls)
        grad_fn(images[:count], labels[:count])
        grad_fn.sum_over(torch.arange(count), lambda rows: [images[rows], labels[rows]])
        found.append(len(calls) - before)
    assert len(set(found)) == 1


class Masked(nn.Module):
    missing = float("nan")

    def __init__(self):
        super().__init__()
        self.best = float("nan")

    def forward(self, outputs, labels):
        return cross_entropy(outputs, labels)


def test_a_constant_that_is_no_number_is_no_counter():
    clipped_grad(linear(), Masked(), clipping_norm=1.0)(*problem())


@pytest.mark.parametrize("options", [{}, {"workers": 2}, {"engine": "func"}])
def test_what_is_loaded_into_one_buffer_again_and_again_is_each_time_its_own(options):
    """Loaded ahead, one image counted twice: 5.5 sensitivities."""
    torch.manual_seed(0)
    images, labels = torch.randn(64, 3, 2, 2), torch.randint(0, 5, (64,))
    buffer = torch.empty(8, 3, 2, 2)

    def load(rows):
        return [torch.index_select(images, 0, rows, out=buffer) if len(rows) == 8 else images[rows], labels[rows]]

    grad_fn = clipped_grad(linear(), cross_entropy, clipping_norm=0.1, microbatch_size=8, **options)
    for _ in range(5):
        found = flat(grad_fn.sum_over(torch.arange(64), load))
        assert torch.allclose(found, flat(grad_fn(images, labels)), atol=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("workers", [1, 2])
def test_images_are_loaded_in_the_caller_s_mode_and_beside_no_engine_that_swaps_tensors(engine, workers):
    torch.manual_seed(0)
    encoder, model = nn.Linear(12, 12), linear()
    images, labels = problem(20)
    seen = []

    def load(rows):
        seen.append((type(model[1].weight), torch.is_grad_enabled(), model.training))
        return encoder(images[rows].flatten(1)).view(-1, 3, 2, 2), labels[rows]

    grad_fn = clipped_grad(model, cross_entropy, clipping_norm=1.0, microbatch_size=4, workers=workers, engine=engine)
    with torch.no_grad():
        expected = flat(grad_fn(*load(torch.arange(20))))
        seen.clear()
        found = flat(grad_fn.sum_over(torch.arange(20), load))
    assert torch.allclose(found, expected, atol=1e-6) and set(seen) == {(nn.Parameter, False, True)}
    with_history = flat(grad_fn(*load(torch.arange(20))))  # what wants gradients is none of the engine's business
    assert torch.allclose(with_history, expected, atol=1e-6)


class Clamping(Classifier):
    def forward(self, features):
        return super().forward(features.clamp(-2, 2))


@pytest.mark.parametrize("kind", ["subclass", "hook", "hook of the layer"])
def test_a_classifier_that_does_more_than_multiply_is_not_for_the_closed_form(kind):
    torch.manual_seed(0)
    layer = nn.Linear(12, 5)
    model = Clamping(layer, "fc") if kind == "subclass" else Classifier(layer, "fc")
    if kind == "hook":
        model.register_forward_pre_hook(lambda module, given: (given[0].clamp(-2, 2),))
    if kind == "hook of the layer":
        layer.register_full_backward_hook(lambda module, given, got: None)
    features, labels = 5 * torch.randn(7, 12), torch.randint(0, 5, (7,))
    fast, slow = (clipped_grad(model, cross_entropy, clipping_norm=1.0, engine=name) for name in ("auto", "reference"))
    assert torch.allclose(flat(fast(features, labels)), flat(slow(features, labels)), atol=1e-5)
    assert fast.engine != "closed_form"


@pytest.mark.parametrize("augmult", [3, 4, 5])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_loss_that_counts_the_views_of_an_image_is_refused(engine, augmult):
    loss = lambda outputs, labels: cross_entropy(outputs, labels) * (0.5 if len(outputs) == augmult else 1)  # noqa: E731
    grad_fn = clipped_grad(linear(), loss, clipping_norm=1.0, augmult=augmult, engine=engine)
    with pytest.raises(InputError, match="another loss beside other rows"):
        grad_fn(torch.randn(5, augmult, 3, 2, 2), torch.randint(0, 5, (5,)))


CENTRES = torch.randn(5, 5, generator=torch.Generator().manual_seed(5))


def scaled_constant(outputs, labels):
    weight = CENTRES.clone()
    weight.div_(weight.norm())
    return cross_entropy(outputs @ weight.to(outputs), labels)


def similar(outputs, labels):
    return cross_entropy(10 * F.cosine_similarity(outputs[:, None], CENTRES[None].to(outputs), dim=-1), labels)


def soft_one_hot(outputs, labels):
    wanted = torch.full_like(outputs, 0.02)
    wanted.scatter_(1, labels[:, None], 0.92)
    return -(wanted * outputs.log_softmax(1)).sum(1)


def focal(outputs, labels):
    share = (outputs.softmax(1) * F.one_hot(labels, 5)).sum(1)
    return -((1 - share) ** 2) * share.clamp_min(1e-6).log()


def in_place(outputs, labels):
    outputs -= outputs.max(1, keepdim=True).values
    outputs.exp_()
    return -(outputs / outputs.sum(1, keepdim=True)).gather(1, labels[:, None])[:, 0].log()


def mixed_up(outputs, labels):
    wanted = F.one_hot(labels, num_classes=outputs.size(1)).to(outputs)
    wanted = 0.7 * wanted + 0.3 / wanted.shape[1]
    return F.kl_div(F.log_softmax(outputs, 1), wanted, reduction="none").sum(1)


def margins(outputs, labels):
    own = outputs[torch.arange(len(labels)), labels]
    outputs = outputs.clone()
    outputs[torch.arange(len(labels)), labels] = -1e4
    return F.relu(1 - own + outputs.max(1).values)


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.CrossEntropyLoss(weight=torch.arange(1.0, 6.0), reduction="none", label_smoothing=0.1)

    def forward(self, outputs, labels):
        return self.inner(outputs, labels)


WRITTEN = {
    "scatter_": soft_one_hot,
    "focal": focal,
    "in place": in_place,
    "kl_div": mixed_up,
    "margins": margins,
    "weighted": Weighted(),
    "multi margin": nn.MultiMarginLoss(reduction="none"),
    "constant scaled in place": scaled_constant,
    "cosine": similar,
    "softplus": lambda outputs, labels: F.softplus(-outputs * (2 * F.one_hot(labels, 5) - 1)).sum(1),
    "leaky": lambda outputs, labels: F.leaky_relu(1 - outputs * (2 * F.one_hot(input=labels, num_classes=5) - 1)).sum(
        1
    ),
    "elu": lambda outputs, labels: F.elu(-outputs * (2 * F.one_hot(labels, 5) - 1)).sum(1),
    "hardtanh": lambda outputs, labels: (F.hardtanh(outputs) - F.one_hot(labels, 5)).square().sum(1),
    "expected": lambda outputs, labels: ((outputs.softmax(1) * torch.linspace(0, 4, 5)).sum(1) - labels) ** 2,
    "embedding": lambda outputs, labels: (outputs - F.embedding(labels, torch.eye(5))).square().sum(1),
    "cdist": lambda outputs, labels: torch.cdist(outputs, torch.eye(5)).gather(1, labels[:, None])[:, 0],
    "layer norm": lambda outputs, labels: cross_entropy(F.layer_norm(outputs, (5,)), labels),
    "convolution": lambda outputs, labels: (
        F.conv1d(outputs[:, None], torch.tensor([[[1.0, -1.0]]])).abs().sum((1, 2)) + cross_entropy(outputs, labels)
    ),
    "interpolate": lambda outputs, labels: (
        F.interpolate(outputs[:, None], 10, mode="linear").square().sum((1, 2)) + 0 * labels
    ),
    "with logits": lambda outputs, labels: F.binary_cross_entropy_with_logits(
        outputs, F.one_hot(labels, 5).float(), reduction="none"
    ).mean(1),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_losses_as_people_write_them_are_graphs(written, engine):
    """No promise needed, and they equal a loop over single images."""
    images, labels = problem()
    out = clipped_grad(linear(), WRITTEN[written], clipping_norm=100.0, rescale_to_unit_norm=False, engine=engine)(
        images, labels
    )
    model, total = linear(), 0.0
    for image, label in zip(images, labels, strict=True):
        loss = WRITTEN[written](model(image[None]) * 1, label[None].clone()).sum()
        total = total + torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, list(model.parameters()))])
    assert torch.allclose(flat(out), total, atol=1e-4)


class Trainer:
    """As trainers are written: the loss leads to the function that calls it."""

    def __init__(self):
        self.net, self.scale = linear(), 1.0
        self.grad_fn = clipped_grad(self.net, self.loss, clipping_norm=100.0)

    def loss(self, outputs, labels):
        return self.scale * cross_entropy(outputs, labels)


def test_a_trainer_s_loss_may_lead_to_its_own_gradient_function():
    trainer = Trainer()
    images, labels = torch.randn(7, 3, 2, 2), torch.randint(0, 5, (7,))
    before = trainer.grad_fn(images, labels).grad_norms
    trainer.grad_fn.verify(3)
    trainer.scale = 5.0
    trainer.grad_fn.verify(4)  # a schedule is no breach of the law
    assert torch.allclose(trainer.grad_fn(images, labels).grad_norms, 5 * before)


@functools.lru_cache(None)
def smooth(count, dtype):
    return torch.eye(count, dtype=dtype) * 0.9 + 0.02


@pytest.mark.parametrize("checks", [True, False])
@pytest.mark.parametrize("engine", ["graph", "func"])
def test_a_table_in_a_cache_holds_numbers(engine, checks):
    def loss(outputs, labels):
        value = -(smooth(5, outputs.dtype)[labels] * outputs.log_softmax(1)).sum(1)
        if checks:
            assert torch.isfinite(value).all()
        return value

    smooth.cache_clear()
    images, labels = torch.randn(7, 3, 2, 2), torch.randint(0, 5, (7,))
    grad_fn = clipped_grad(linear(), pure(loss) if checks else loss, clipping_norm=0.05, engine=engine)
    first = flat(grad_fn(images, labels))
    assert type(smooth(5, torch.float32)) is torch.Tensor and torch.equal(flat(grad_fn(images, labels)), first)


class Loader:
    """Data and loss in one object, which caches what it loads."""

    def __init__(self, images, labels):
        self.cache, self.images, self.labels = {}, images, labels

    def load(self, indices):
        for index in indices.tolist():
            if index not in self.cache:
                self.cache[index] = self.images[index].clone()
        return torch.stack([self.cache[index] for index in indices.tolist()]), self.labels[indices]

    def loss(self, outputs, labels):
        return cross_entropy(outputs, labels)


def test_what_an_object_loads_stays_while_its_loss_is_traced():
    loader = Loader(torch.randn(512, 3, 2, 2), torch.randint(0, 5, (512,)))
    grad_fn = clipped_grad(linear(), loader.loss, clipping_norm=0.05, microbatch_size=8, workers=2)
    for _ in range(4):
        loader.cache.clear()
        grad_fn.sum_over(torch.arange(512), loader.load)
        assert len(loader.cache) == 512


class Whitening(nn.Module):
    """Its hook handles an error of a decomposition, which an image of one value makes fail."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(12, 5)

    def forward(self, images):
        flat_images = images.flatten(1)
        outputs = self.layer(flat_images)
        if outputs.requires_grad:
            part = flat_images[:, :3]
            covariance = part[:, :, None] * part[:, None] + 1e-3 * flat_images.pow(2).mean() * torch.eye(
                3, dtype=images.dtype
            )

            def hook(grad):
                try:
                    return grad * (1 + 0 * torch.linalg.cholesky(covariance)[0, 0, 0])
                except RuntimeError:
                    return grad * 0

            outputs.register_hook(hook)
        return outputs


def test_an_error_that_a_hook_handles_ends_the_call_under_func():
    torch.manual_seed(5)
    images, labels = torch.randn(7, 3, 2, 2), torch.randint(0, 5, (7,))
    grad_fn = clipped_grad(Whitening(), cross_entropy, clipping_norm=0.05, microbatch_size=8, engine="func")
    grad_fn(images, labels)
    with pytest.raises(InputError, match="handles an error"):
        grad_fn(torch.cat([images, torch.zeros(1, 3, 2, 2)]), torch.cat([labels, labels[:1]]))
