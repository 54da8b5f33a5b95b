"""Methods are chosen by what they cost once they run, and on a GPU none is tried that cannot be fast there."""

import dataclasses
import types

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from sfumato.clipping.graph import autotune
from sfumato.clipping.graph.rules import METHODS, candidates, worth_trying
from sfumato.clipping.graph.rules import convolution as conv_operators
from tests.clipping.test_rules import EXAMPLES, assert_contribution, convolution, meet


class Clock:
    """Seconds that methods are said to take: the first call, and those after it."""

    def __init__(self, monkeypatch, costs):
        self.now, self.calls = 0.0, dict.fromkeys(costs, 0)
        read = lambda: self.now  # noqa: E731
        monkeypatch.setattr(autotune, "time", types.SimpleNamespace(perf_counter=read, thread_time=read))
        for name, seconds in costs.items():
            monkeypatch.setitem(METHODS, name, self.method(name, METHODS[name], seconds))

    def method(self, name, true, seconds):
        def timed(record, argument):
            self.now += seconds[min(self.calls[name], len(seconds) - 1)]
            self.calls[name] += 1
            return true(record, argument)

        return timed


def record_of(kind="strided", views=3):
    rows = torch.randn(EXAMPLES * views, 4, 9, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    if kind == "transposed":
        weight = torch.ones(4, 2, 3, 3, dtype=torch.float64)
        operation, args = torch.ops.aten.conv_transpose2d.input, [rows, weight, None, [2, 2], [0, 0], [0, 0], 1, [1, 1]]
    else:
        operation, of_rows = convolution(kind, torch.contiguous_format)
        args = of_rows(rows)
    return meet(operation, args, "weight", views)


WARM = {"loop": 8.0, "grouped": 1.0, "unfold": 2.0}


@pytest.mark.parametrize("cold", [0.0, 10.0, 1e6])
@pytest.mark.parametrize("order", [list(WARM), list(WARM)[::-1]])
def test_what_first_calls_cost_decides_nothing(cold, order, monkeypatch):
    clock = Clock(
        monkeypatch, {name: (cold * (2 - number) + warm, warm) for number, (name, warm) in enumerate(WARM.items())}
    )
    assert chosen(order) == "grouped"
    assert max(clock.calls.values()) <= 4


def test_one_busy_moment_decides_nothing(monkeypatch):
    Clock(monkeypatch, {"loop": (8.0,), "grouped": (1.0, 1.0, 50.0, 1.0), "unfold": (2.0,)})
    assert chosen(["grouped", "unfold", "loop"]) == "grouped"


def test_a_method_that_memory_does_not_hold_is_left_out_unless_it_is_the_only_one(monkeypatch):
    def too_large(record, argument):
        raise torch.OutOfMemoryError("CUDA out of memory")

    Clock(monkeypatch, {"loop": (8.0,), "unfold": (2.0,)})
    monkeypatch.setitem(METHODS, "grouped", too_large)
    assert chosen(["grouped", "unfold", "loop"]) == chosen(["unfold", "loop", "grouped"]) == "unfold"
    with pytest.raises(torch.OutOfMemoryError):
        chosen(["grouped"])


def chosen(names):
    weights = types.SimpleNamespace(directions={}, values={})
    return autotune.fastest(names, record_of()[0], "weight", weights)


def on_a_gpu(record):
    """The same site with tensors that are said to lie on a GPU."""

    def moved(value):
        return torch.empty(value.shape, dtype=value.dtype, device="cuda") if isinstance(value, torch.Tensor) else value

    with FakeTensorMode():
        args = {name: moved(value) for name, value in record.args.items()}
        return dataclasses.replace(record, args=args, grad=moved(record.grad))


@pytest.mark.parametrize("kind", ["strided", "transposed"])
def test_a_gpu_never_computes_more_than_sixteen_examples_one_by_one(kind):
    record, true = record_of(kind)
    for examples in (16, 17, 4096):
        assert "loop" in candidates(record, "weight", examples)
        found = candidates(on_a_gpu(record), "weight", examples)
        assert ("loop" in found) == (examples <= 16)
        assert found
        for name in found:
            assert_contribution(METHODS[name](record, "weight"), true)


def test_a_gpu_tries_every_method_that_fits():
    """There the clock is right: a whole microbatch is tried."""
    record, names = record_of()[0], ["grouped", "unfold", "conv_ghost"]
    assert worth_trying(names, on_a_gpu(record), "weight") == names


class LargestCopy(TorchDispatchMode):
    nbytes = 0

    def __torch_dispatch__(self, operation, kinds, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        if operation == torch.ops.aten.clone.default:
            self.nbytes = max(self.nbytes, out.nbytes)
        return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_patches_on_a_gpu_take_half_a_gibibyte_at_most(dtype):
    """512 examples of 16 views; the meta device computes nothing, and is no CPU."""
    inputs, grads = (torch.empty(512, 16, 64, 32, 32, dtype=dtype, device="meta") for _ in range(2))
    by_patches = conv_operators.conv_weight_gradients_by_patches._init_fn
    with LargestCopy() as copies:
        out = by_patches(inputs, grads, [3, 3], [1, 1], [1, 1], [1, 1])
    assert out.shape == (512, 64, 64, 3, 3)
    assert 2**28 < copies.nbytes <= 2**29
