"""Microbatches side by side: the same bits as one after another."""

import threading
import time

import pytest
import torch

from sfumato.clipping import clipped_grad
from sfumato.clipping.workers import Workers
from sfumato.errors import InputError


def test_results_come_in_the_order_of_the_parts_whoever_finishes_first():
    assert list(Workers(3).map(bool, lambda part, _: time.sleep(0.05 * (3 - part)) or part, range(4))) == [0, 1, 2, 3]


def test_each_worker_computes_on_one_thread_and_the_caller_keeps_its_own():
    before = torch.get_num_threads()
    assert set(Workers(2).map(bool, lambda part, _: torch.get_num_threads(), range(6))) == {1}
    assert torch.get_num_threads() == before


def test_one_worker_is_the_caller():
    threads = Workers(1).map(bool, lambda part, _: threading.current_thread(), range(3))
    assert set(threads) == {threading.current_thread()}


@pytest.mark.parametrize(
    ("engine", "layer", "parallel"),
    [
        ("graph", torch.nn.ReLU(), True),
        ("graph", torch.nn.Dropout(0.5), True),  # its masks are each image's own, whoever comes first
        ("func", torch.nn.ReLU(), False),
        ("reference", torch.nn.ReLU(), False),
    ],
)
def test_only_what_finds_the_same_in_several_threads_is_given_to_several(engine, layer, parallel):
    model = torch.nn.Sequential(layer, torch.nn.Flatten(), torch.nn.Linear(36, 3))
    grad_fn = clipped_grad(
        model, torch.nn.CrossEntropyLoss(reduction="none"), clipping_norm=1.0, engine=engine, workers=2
    )
    grad_fn(torch.randn(2, 1, 6, 6), torch.tensor([0, 1]), key=bytes(32), example_ids=torch.arange(2))
    assert grad_fn.parallel == parallel
    assert grad_fn.num_workers == (2 if parallel else 1)


def test_a_fault_in_a_worker_reaches_the_caller():
    def fail(part, _):
        if part == 2:
            raise ValueError("part 2")

    with pytest.raises(ValueError, match="part 2"):
        list(Workers(2).map(bool, fail, range(4)))


def test_the_sum_of_clipped_gradients_has_the_same_bits_each_time():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.GroupNorm(2, 4), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(64, 3)
    )
    inputs, targets = torch.randn(40, 1, 6, 6), torch.randint(3, (40,))
    loss = torch.nn.CrossEntropyLoss(reduction="none")
    by_two = clipped_grad(model, loss, clipping_norm=1.0, microbatch_size=5, engine="graph", workers=2)
    by_two.prepare(inputs, targets)
    first = by_two(inputs, targets).grad_sum
    assert all(
        torch.equal(first[name], value) for _ in range(5) for name, value in by_two(inputs, targets).grad_sum.items()
    )
    alone = clipped_grad(model, loss, clipping_norm=1.0, microbatch_size=5, engine="graph")(inputs, targets).grad_sum
    torch.testing.assert_close(first, alone)


def test_examples_that_are_loaded_in_their_turn_give_what_they_give_together():
    """And `load` is asked for each index, the last microbatch's first one again to fill it up."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Dropout(0.5), torch.nn.Linear(36, 3))
    inputs, targets, key = torch.randn(40, 1, 6, 6), torch.randint(3, (40,)), bytes(32)
    indices, asked = torch.tensor([3, 39, 8, 21, 0, 17, 30]), []
    grad_fn = clipped_grad(
        model, torch.nn.CrossEntropyLoss(reduction="none"), clipping_norm=1.0, microbatch_size=4, engine="graph"
    )
    grad_fn.prepare(inputs, targets)

    def load(rows):
        asked.extend(rows.tolist())
        return inputs[rows], targets[rows]

    out = grad_fn.sum_over(indices, load, key=key)
    assert set(asked) == set(indices.tolist()) and len(asked) <= 1 + 4 + 4
    together = grad_fn(inputs[indices], targets[indices], key=key, example_ids=indices)
    assert torch.equal(out.grad_norms, together.grad_norms) and torch.equal(out.losses, together.losses)
    assert all(torch.equal(out.grad_sum[name], value) for name, value in together.grad_sum.items())
    empty = grad_fn.sum_over(indices[:0], load, key=key)
    assert all(not value.any() for value in empty.grad_sum.values()) and empty.grad_norms.shape == (0,)


def test_examples_of_another_shape_than_the_first_are_refused():
    model = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(1, 3))
    loss = torch.nn.CrossEntropyLoss(reduction="none")
    grad_fn = clipped_grad(model, loss, clipping_norm=1.0, microbatch_size=2)
    with pytest.raises(InputError, match="another shape"):
        grad_fn.sum_over(torch.arange(4), lambda rows: (torch.randn(len(rows), 1, 6 + int(rows[0]) // 2, 6), rows % 3))


def test_the_next_microbatch_is_loaded_while_one_is_computed():
    loaded, begun = [threading.Event() for _ in range(3)], []

    def load(number):
        loaded[number].set()
        return 10 * number

    def compute(number, value):
        begun.append((number, value))
        assert number == 2 or loaded[number + 1].wait(5)  # before this one ends
        return value

    assert list(Workers(1).map(load, compute, range(3))) == [0, 10, 20]
    assert begun == [(0, 0), (1, 10), (2, 20)]


def test_not_more_than_one_is_loaded_ahead():
    loaded = []
    results = Workers(1).map(loaded.append, lambda number, _: len(loaded), range(20))
    for number, _ in enumerate(results):
        assert len(loaded) <= number + 3


@pytest.mark.parametrize("count", [1, 2])
def test_an_error_of_loading_is_the_caller_s(count):
    def load(number):
        if number == 3:
            raise OSError("damaged")
        return number

    with pytest.raises(OSError, match="damaged"):
        list(Workers(count).map(load, lambda number, value: value, range(6)))
