"""Whatever is changed about a model between two calls counts at the next call: settings, helpers, buffers, hooks."""

import argparse
import dataclasses
import functools
import time
import types

import numpy as np
import pytest
import torch
from torch import nn

from sfumato.clipping import clipped_grad
from sfumato.clipping.signature import signature
from tests.clipping.problems import by_hand, cross_entropy


@dataclasses.dataclass(slots=True)
class Options:
    tau: float = 1.0


class Schedule:
    def __init__(self):
        self.inner = types.SimpleNamespace(tau=1.0)


class Settings(nn.Module):
    """Scales by whatever a program may keep a number in."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(4, 6), nn.Linear(6, 3)
        self.register_buffer("mask", None)
        self.register_buffer("scale", torch.ones(6), persistent=False)
        self.args, self.nested = argparse.Namespace(tau=1.0), {"a": {"tau": 1.0}, "b": [1.0, (1.0,)]}
        self.slots, self.helper, self.tables = Options(), Schedule(), {"a": [torch.ones(6)]}
        self.power, self.taus = functools.partial(pow, 1.0), {1.0}
        self.array, self.read = np.ones(1), torch.ones(1)
        self.drop = [nn.Dropout(0.0)]  # not one of its modules
        self.helper.inner.back = self  # a cycle

    def forward(self, x):
        h = self.drop[0](torch.tanh(self.layer(x))) * self.scale
        h = h if self.mask is None else h * self.mask
        h = h / self.args.tau / self.nested["a"]["tau"] / self.nested["b"][1][0]
        h = h / self.slots.tau / self.helper.inner.tau
        h = h * self.tables["a"][0] / max(self.taus) * self.power(2.0) * float(self.array[0]) * self.read.item()
        return self.head(h)


def set_at(obj, name, value):
    return lambda model: setattr(functools.reduce(getattr, obj.split("."), model) if obj else model, name, value)


CHANGES = {
    "a buffer that was none": set_at("", "mask", torch.tensor([1.0, 0.0, 2.0, 0.0, 1.0, 3.0])),
    "a buffer's values": lambda model: model.scale.copy_(torch.arange(6.0)),
    "another buffer": set_at("", "scale", torch.arange(6.0)),
    "a namespace": set_at("args", "tau", 0.25),
    "a nested dictionary": lambda model: model.nested["a"].update(tau=0.25),
    "a tuple in a list": lambda model: model.nested["b"].__setitem__(1, (0.25,)),
    "slots": set_at("slots", "tau", 0.25),
    "a helper's helper": set_at("helper.inner", "tau", 0.25),
    "a tensor in a list": lambda model: model.tables["a"].__setitem__(0, torch.arange(6.0)),
    "a tensor in a list in place": lambda model: model.tables["a"][0].mul_(torch.arange(6.0)),
    "a partial function": set_at("", "power", functools.partial(pow, 3.0)),
    "a set": set_at("", "taus", {4.0}),
    "an array in place": lambda model: model.array.__setitem__(0, 3.0),
    "a number in a tensor": lambda model: model.read.fill_(3.0),
    "a number in a tensor, unseen": lambda model: model.read.data.fill_(3.0),
    "other weights": lambda model: model.layer.weight.data.mul_(2.0),
    "another head": set_at("", "head", nn.Linear(6, 5)),
    "a hidden module": lambda model: model.drop.__setitem__(0, nn.Hardtanh(-0.1, 0.1)),
    "a hidden module's setting": lambda model: setattr(model.drop[0], "forward", lambda x: 3 * x),
    "a frozen layer": lambda model: model.layer.requires_grad_(False),
}


def assert_up_to_date(grad_fn, model):
    inputs, targets = torch.randn(3, 4, generator=torch.Generator().manual_seed(5)), torch.tensor([0, 1, 2])
    found, expected = grad_fn(inputs, targets).grad_sum, by_hand(model, inputs, targets)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-5)


def make():
    torch.manual_seed(0)
    model = Settings()
    options = {"engine": "graph", "methods": {"memory_format": "contiguous"}}
    return model, clipped_grad(model, cross_entropy, clipping_norm=1.0, **options)


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_between_calls_counts(name):
    model, grad_fn = make()
    assert_up_to_date(grad_fn, model)
    with torch.no_grad():
        CHANGES[name](model)
    assert_up_to_date(grad_fn, model)


def test_a_buffer_that_goes_is_gone():
    model, grad_fn = make()
    model.mask = torch.arange(6.0)
    assert_up_to_date(grad_fn, model)
    model.mask = None
    assert_up_to_date(grad_fn, model)


class Doubles:
    """A hook with a setting of its own."""

    def __init__(self, by):
        self.by = by

    def __call__(self, module, args, output):
        return output * self.by


@pytest.mark.parametrize("of", ["module", "everywhere"])
def test_a_hook_that_replaces_another_counts(of):
    """Their number tells nothing, nor does the function's place in memory, which the next one may take."""
    model, grad_fn = make()
    register = model.layer.register_forward_hook if of == "module" else nn.modules.module.register_module_forward_hook
    for factor in (1.0, 3.0, 0.5):
        handle = register(lambda module, args, out, factor=factor: out * factor if module is model.layer else None)
        assert_up_to_date(grad_fn, model)
        handle.remove()
    hook = Doubles(1.0)
    with_setting = model.layer.register_forward_hook(hook)
    assert_up_to_date(grad_fn, model)
    hook.by = 3.0
    assert_up_to_date(grad_fn, model)
    with_setting.remove()


def test_a_hook_on_a_parameter_that_replaces_another_counts():
    model, _ = make()
    for factor in (1.0, 3.0):
        handle = model.layer.weight.register_hook(lambda grad, factor=factor: grad * factor)
        with_hook = clipped_grad(model, cross_entropy, clipping_norm=1.0)
        assert_up_to_date(with_hook, model)
        handle.remove()
        handle = model.layer.weight.register_hook(lambda grad: grad * 5.0)
        assert_up_to_date(with_hook, model)
        handle.remove()
        assert_up_to_date(with_hook, model)


def test_an_object_that_takes_the_place_of_another_in_memory_is_another():
    model, places = nn.Linear(2, 2), set()
    before = signature(model)
    for _ in range(50):
        model.helper = lambda x: x
        places.add(id(model.helper))
        now = signature(model)
        assert not before.holds(now)
        before = now
        del model.helper  # before the next one is made
    assert len(places) < 50


def steps(model, optimizer):
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()


def test_training_is_no_change():
    """Or every update would be traced anew."""
    model, _ = make()
    model.optimizer = torch.optim.Adam(model.parameters())
    model.groups = [list(model.parameters())]
    before = signature(model)
    steps(model, model.optimizer)
    assert before.holds(signature(model))


@pytest.mark.parametrize("engine", ["func", "reference"])
def test_what_a_model_s_own_code_notes_in_a_helper_costs_no_new_look_at_every_call(engine, monkeypatch):
    class Notes(nn.Linear):
        def forward(self, x):
            SEEN.append(tuple(x.shape))
            self.helper.calls += 1
            return super().forward(x)

    model = Notes(4, 3)
    model.helper = types.SimpleNamespace(calls=0)
    grad_fn = clipped_grad(model, cross_entropy, clipping_norm=1.0, engine=engine)
    inputs, targets = torch.randn(3, 4), torch.tensor([0, 1, 2])
    grad_fn(inputs, targets)
    monkeypatch.setattr(grad_fn, "_preparation", None)
    for _ in range(2):
        grad_fn(inputs, targets)


SEEN = []


def test_looking_for_changes_costs_little():
    """Below a millisecond for a hundred modules on an idle core; here it may be busy."""
    model = nn.Sequential(*[nn.Sequential(nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4), nn.ReLU()) for _ in range(25)])
    model.table = list(range(10**6))
    signature(model)
    seconds = []
    for _ in range(20):
        start = time.perf_counter()
        signature(model)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.01
