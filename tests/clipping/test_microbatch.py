"""The microbatch size is found by trying, and no number of attempts changes a result."""

import math
import weakref

import pytest
import torch

from sfumato.clipping import clipped_grad
from sfumato.clipping.microbatch import count_saved, default_microbatch_size, find_microbatch_size, fits_batch
from sfumato.clipping.prepared import BUILDERS
from sfumato.errors import InputError, MachineError, refusing
from tests.clipping.problems import cross_entropy


def test_gradients_of_a_microbatch_take_64_mb_where_8_to_128_examples_may_do_so():
    for written_out in (100, 130_000, 500_000, 2_000_000, 2_200_000, 30_000_000, 10**9):
        size = default_microbatch_size(written_out, 1000)
        taken = 4 * written_out * size
        assert size in (8, 16, 32, 64, 128)
        assert taken <= 2**26 or size == 8
        assert 2 * taken > 0.9 * 2**26 or size == 128


def test_what_is_kept_for_the_backward_pass_takes_a_gibibyte_at_most():
    for values_saved in (10**6, 10**7, 10**8, 10**10):
        size = default_microbatch_size(1000, values_saved)
        assert 4 * size * values_saved <= 2**30 or size == 1
        assert 8 * size * values_saved > 2**30 or size == 128
        assert default_microbatch_size(1000, values_saved, 64) == max(1, size // 8) or size == 128


def test_what_autograd_keeps_is_counted_without_the_parameters():
    """The linear layer's input and the ReLU's result."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.ReLU())
    with count_saved() as saved:
        model(torch.ones(4, 3))
    assert saved == [4 * (3 + 5)]


def test_what_was_counted_is_freed_at_once():
    with count_saved():
        output = weakref.ref(torch.ones(4, requires_grad=True).exp())  # whose backward pass takes the output itself
    assert output() is None


def test_a_batch_has_four_microbatches_or_little_is_computed_for_nothing():
    for batch_size in range(1, 4097):
        size = fits_batch(batch_size)
        assert size & (size - 1) == 0 and (4 * size <= batch_size or size <= 8)
        assert size <= 2 * batch_size and (8 * size > batch_size or size >= 8)


class Machine:
    """Holds so many examples; from `saturated` on, more at once are no faster."""

    def __init__(self, holds, saturated=1 << 30):
        self.holds, self.saturated, self.tried = holds, saturated, []

    def __call__(self, size):
        self.tried.append(size)
        if size > self.holds:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return max(size, self.saturated) / 1000 if size < self.saturated else size / 1000


@pytest.mark.parametrize(
    ("holds", "saturated", "expected"),
    [(1000, 1 << 30, 512), (10**6, 1 << 30, 4096), (10**6, 256, 256), (100, 16, 64), (128, 1 << 30, 128), (1, 1, 1)],
)
def test_it_grows_while_it_fits_and_gains(holds, saturated, expected):
    machine = Machine(holds, saturated)
    assert find_microbatch_size(machine, 128) == expected
    assert len(machine.tried) == len(set(machine.tried))


@pytest.mark.parametrize(("batch_size", "expected"), [(64, 64), (1024, 128), (4096, 512), (2**20, 1024)])
def test_it_grows_no_further_than_the_last_microbatch_s_waste_allows(batch_size, expected):
    """A microbatch is faster by 8 % for each doubling up to 1,024."""
    faster = lambda size: size * 0.92 ** min(10, math.log2(size))  # noqa: E731
    found = find_microbatch_size(faster, 64, 4096, batch_size)
    costs = {size: faster(size) * (batch_size / size + 0.5) for size in (64, 128, 256, 512, 1024, 2048, 4096)}
    assert found == expected and costs[found] < 1.05 * min(costs.values())


def test_it_grows_no_further_than_the_batch_has_use_for():
    assert find_microbatch_size(Machine(10**6), 64, 256) == 256


def test_a_model_too_large_for_one_example_is_the_machine_s_fault():
    with pytest.raises(MachineError, match="one example"):
        find_microbatch_size(Machine(0), 128)


class OfArrays(MemoryError):
    """As NumPy's own."""


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), OfArrays(), RuntimeError("other")])
def test_no_memory_left_is_the_machine_s_fault_wherever_a_model_is_tried(error, monkeypatch):
    def broken(*_):
        raise error

    kind = InputError if str(error) == "other" else MachineError
    monkeypatch.setattr("sfumato.clipping.engine_check.EngineCheck.refuse_in_run", broken)
    grad_fn = clipped_grad(torch.nn.Linear(3, 2), cross_entropy, clipping_norm=1.0, engine="func", microbatch_size=4)
    with pytest.raises(kind, match="other" if kind is InputError else "a microbatch of 4 examples"):
        grad_fn.prepare(torch.zeros(1, 3), torch.zeros(1, dtype=torch.int64))
    of_its_own = InputError if kind is InputError else type(error)  # where no microbatch is to blame
    with pytest.raises(of_its_own), refusing("what", "remedy", Exception):
        broken()
    monkeypatch.setitem(BUILDERS, "func", broken)
    with pytest.raises(of_its_own):
        grad_fn.prepare(torch.zeros(1, 3), torch.zeros(1, dtype=torch.int64))


def test_any_other_error_is_shown():
    def broken(size):
        raise RuntimeError("another")

    with pytest.raises(RuntimeError, match="another"):
        find_microbatch_size(broken, 128)


@pytest.mark.parametrize("engine", ["graph", "func"])
def test_memory_holds_the_sum_so_far_and_one_microbatch_s(engine, monkeypatch):
    model, held = torch.nn.Linear(3, 2), []
    grad_fn = clipped_grad(model, cross_entropy, clipping_norm=1.0, engine=engine, microbatch_size=1, workers=1)
    grad_fn.prepare(torch.zeros(1, 3), torch.zeros(1, dtype=torch.int64))
    kind = type(grad_fn._prepared.engine)
    whole, sums = kind.clipped_sum, []

    def clipped_sum(self, *arguments):
        held.append(sum(one() is not None for one in sums))
        out = whole(self, *arguments)
        sums.extend(weakref.ref(total) for total in out.grad_sum.values())
        return out

    monkeypatch.setattr(kind, "clipped_sum", clipped_sum)
    grad_fn(torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 0]))
    # The last of a microbatch's tensors waits for the next one's.
    assert held == [0, 2, 3, 3, 3]
