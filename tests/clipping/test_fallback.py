"""Under "auto" every model that keeps the law under some engine trains; others are refused for what they do."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils import _pytree as pytree

from sfumato.clipping import clipped_grad, findings
from sfumato.errors import InputError
from tests.clipping.problems import by_hand, cross_entropy

ENGINES = ["graph", "func", "reference"]


def problem():
    generator = torch.Generator().manual_seed(3)
    return torch.randn(5, 4, 6, generator=generator), torch.tensor([0, 1, 2, 1, 0])


def assert_right(model, engine="auto", loss_fn=cross_entropy):
    inputs, targets = problem()
    grad_fn = clipped_grad(model, loss_fn, clipping_norm=1.0, engine=engine, methods={"memory_format": "contiguous"})
    found, expected = grad_fn(inputs, targets).grad_sum, by_hand(model, inputs, targets, loss_fn)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-5)
    return grad_fn


class Recurrent(nn.Module):
    def __init__(self, make, **options):
        super().__init__()
        self.layer = make(6, 5, batch_first=True, bidirectional=True, **options)
        self.head = nn.Linear(10, 3)

    def forward(self, x):
        return self.head(self.layer(x)[0].mean(1))


class Cells(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.cell, self.head = make(6, 5), nn.Linear(5, 3)

    def forward(self, x):
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(state[0] if isinstance(state, tuple) else state)


RECURRENT = {
    "gru": lambda: Recurrent(nn.GRU),
    "rnn": lambda: Recurrent(nn.RNN),
    "rnn of relu": lambda: Recurrent(nn.RNN, nonlinearity="relu"),
    "lstm": lambda: Recurrent(nn.LSTM),
    "two layers": lambda: Recurrent(nn.GRU, num_layers=2),
    "gru cell": lambda: Cells(nn.GRUCell),
    "rnn cell": lambda: Cells(nn.RNNCell),
    "lstm cell": lambda: Cells(nn.LSTMCell),
}


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers_are_for_the_fast_engine(name):
    torch.manual_seed(0)
    assert assert_right(RECURRENT[name]()).engine == "graph"


def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(24, 5), nn.Tanh(), nn.Linear(5, 3))


class Forwards(nn.Module):
    """Passes on whatever it is given."""

    def __init__(self):
        super().__init__()
        self.inner = plain()

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


@pytest.mark.parametrize("wrapped", [Forwards, lambda: AveragedModel(plain())], ids=["forwards", "averaged"])
def test_a_model_behind_any_arguments_is_for_the_fast_engine(wrapped):
    assert assert_right(wrapped()).engine == "graph"


class Reads(nn.Module):
    """Reads a value, for a log."""

    def __init__(self):
        super().__init__()
        self.inner = plain()

    def forward(self, x):
        h = self.inner(x)
        if h.abs().max().item() < 0:
            raise ValueError
        return h


class Experts(nn.Module):
    """Each image goes to one expert; some reach none of a few images."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(24, 4), nn.ModuleList(nn.Linear(24, 3) for _ in range(4))

    def forward(self, x):
        x = x.flatten(1)
        share, chosen = self.gate(x).softmax(1).max(1)
        out = torch.zeros(len(x), 3, dtype=x.dtype)
        for number, expert in enumerate(self.experts):
            rows = torch.where(chosen == number)[0]
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * share[rows, None])
        return out


def hooked():
    model = plain()
    model[1].weight.register_hook(lambda grad: -grad)
    return model


def scripted():
    return torch.jit.script(plain())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [Reads, Experts, hooked, scripted])
def test_auto_takes_the_slow_engine_where_it_alone_keeps_the_law_and_says_why(make):
    torch.manual_seed(0)
    grad_fn = assert_right(make())
    assert grad_fn.engine == "reference"
    assert "cannot be traced" in grad_fn.refusal or 'engine "graph"' in grad_fn.refusal
    assert '; and engine "func"' in grad_fn.refusal
    for engine in ("graph", "func"):
        with pytest.raises(InputError):
            assert_right(make(), engine)


def test_a_mixture_of_experts_has_no_parameter_without_gradient():
    torch.manual_seed(0)
    assert findings(Experts(), torch.zeros(1, 4, 6)) == []


def test_an_expert_that_no_image_reaches_is_refused_by_name():
    torch.manual_seed(0)
    model = Experts()
    with torch.no_grad():
        model.gate.weight.zero_()
        model.gate.bias.copy_(torch.tensor([0.0, 100.0, 0.0, 0.0]))
    with pytest.raises(InputError, match="'experts.0.weight' receives no gradient"):
        assert_right(model)


@dataclasses.dataclass
class Known:
    logits: torch.Tensor
    kind: str = "known"


@dataclasses.dataclass
class Unknown:
    logits: torch.Tensor


class ModelOutput(dict):
    """As Hugging Face's: a dictionary with attributes, known to PyTorch."""

    def __getattr__(self, name):
        return self[name]


pytree.register_dataclass(Known, field_names=["logits"], drop_field_names=["kind"])
pytree.register_pytree_node(
    ModelOutput,
    lambda out: (list(out.values()), list(out)),
    lambda values, names: ModelOutput(zip(names, values, strict=True)),
    serialized_type_name=f"{__name__}.ModelOutput",
)


class Wraps(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.inner, self.wrap = plain(), wrap

    def forward(self, x):
        return self.wrap(logits=self.inner(x))


def of_logits(outputs, targets):
    return cross_entropy(outputs.logits, targets)


@pytest.mark.parametrize("engine", ["auto", *ENGINES])
@pytest.mark.parametrize("wrap", [Unknown, SimpleNamespace])
def test_outputs_that_pytorch_cannot_look_into_are_refused_with_a_remedy(wrap, engine):
    with pytest.raises(InputError, match=f"returns {wrap.__name__}, in which PyTorch finds no.*Return a tensor"):
        assert_right(Wraps(wrap), engine, of_logits)


@pytest.mark.parametrize("engine", ["auto", *ENGINES])
@pytest.mark.parametrize("wrap", [Known, ModelOutput])
def test_outputs_of_classes_that_pytorch_knows_are_taken(wrap, engine):
    assert_right(Wraps(wrap), engine, of_logits)


@pytest.mark.parametrize("engine", ["auto", *ENGINES])
def test_images_and_targets_of_a_wrong_type_are_refused_by_name(engine):
    inputs, targets = problem()
    for dtype in (torch.float64, torch.float16):
        grad_fn = clipped_grad(plain(), cross_entropy, clipping_norm=1.0, engine=engine)
        with pytest.raises(InputError, match=rf"inputs are {dtype}.*inputs.to\(torch.float32\)"):
            grad_fn(inputs.to(dtype), targets)
    for given in ((inputs, targets.numpy()), (inputs.numpy(), targets), (inputs, targets.tolist())):
        with pytest.raises(InputError, match="must be dense tensors"):
            clipped_grad(plain(), cross_entropy, clipping_norm=1.0, engine=engine)(*given)


class Casts(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = plain()

    def forward(self, x):
        return self.inner(x.to(self.inner[1].weight.dtype))


@pytest.mark.parametrize("engine", ["auto", *ENGINES])
def test_a_model_that_converts_its_images_takes_them(engine):
    inputs, targets = problem()
    clipped_grad(Casts(), cross_entropy, clipping_norm=1.0, engine=engine)(inputs.double(), targets)


@pytest.mark.parametrize("engine", ["auto", *ENGINES])
@pytest.mark.parametrize("when", ["first", "later", "verified"])
def test_weights_that_pytorch_caches_between_calls_are_refused(when, engine):
    """Their record is used up, or leads to a graph of another call."""
    inputs, targets = problem()
    model = plain()
    nn.utils.parametrizations.weight_norm(model[1])
    grad_fn = clipped_grad(model, cross_entropy, clipping_norm=1.0, engine=engine)
    if when != "first":
        grad_fn(inputs, targets)
    with nn.utils.parametrize.cached(), pytest.raises(InputError, match=r"parametrize.cached.*parameters_fixed"):
        if when == "verified":
            grad_fn.verify(3)
        else:
            grad_fn(inputs, targets)
    grad_fn(inputs, targets)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("called", [False, True])
def test_a_check_within_fixed_parameters_leaves_nothing_behind(called, engine):
    """Weights of made-up parameters, in double precision, say."""
    inputs, targets = problem()
    model = plain()
    grad_fn = clipped_grad(model, cross_entropy, clipping_norm=1.0, engine=engine)
    expected = grad_fn(inputs, targets).grad_sum
    with grad_fn.parameters_fixed():
        if called:
            grad_fn(inputs, targets)
        for seed in (3, 4):
            grad_fn.verify(seed)
        again = grad_fn(inputs, targets).grad_sum
    assert all(torch.equal(value, again[name]) for name, value in expected.items())


@pytest.mark.parametrize("make", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_power_iterations_are_refused_for_what_they_do(make):
    """They mix nothing; they move a buffer at every call."""
    model = nn.Sequential(nn.Flatten(), make(nn.Linear(24, 3)))
    with pytest.raises(InputError, match="changes its buffer"):
        assert_right(model)
    (found,) = findings(model, torch.zeros(1, 4, 6))
    assert "changes its buffer" in found.reason and "eval mode" in found.remedy


def test_random_numbers_drawn_by_shape_train():
    """A draw of a shape, in which `torch.func` shows one image's rows only."""

    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = plain()

        def forward(self, x):
            if float(x.detach().mean()) > 1e9:
                return self.inner(x)
            return self.inner(x + torch.randn(x.shape[0], 4, 6, dtype=x.dtype))

    inputs, targets = problem()
    given = {"key": bytes(32), "example_ids": torch.arange(5)}
    model = Noisy()
    auto, slow = (clipped_grad(model, cross_entropy, clipping_norm=1.0, engine=name) for name in ("auto", "reference"))
    one, other = (grad_fn(inputs, targets, **given).grad_sum for grad_fn in (auto, slow))
    assert auto.engine == "reference"
    assert all(torch.equal(value, other[name]) for name, value in one.items())
