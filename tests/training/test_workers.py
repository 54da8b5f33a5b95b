"""Microbatches side by side: the same bits as one after another."""

import threading
import time

import pytest
import torch

from sfumato.clipping import clipped_grad
from sfumato.training.workers import Workers, workers_for


def test_results_come_in_the_order_of_the_parts_whoever_finishes_first():
    assert list(Workers(3).map(lambda part: time.sleep(0.05 * (3 - part)) or part, range(4))) == [0, 1, 2, 3]


def test_each_worker_computes_on_one_thread_and_the_caller_keeps_its_own():
    before = torch.get_num_threads()
    assert set(Workers(2).map(lambda part: torch.get_num_threads(), range(6))) == {1}
    assert torch.get_num_threads() == before


def test_one_worker_is_the_caller():
    assert set(Workers(1).map(lambda part: threading.current_thread(), range(3))) == {threading.current_thread()}


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
    grad_fn = clipped_grad(model, torch.nn.CrossEntropyLoss(reduction="none"), clipping_norm=1.0, engine=engine)
    grad_fn(torch.randn(2, 1, 6, 6), torch.tensor([0, 1]), key=bytes(32), example_ids=torch.arange(2))
    assert grad_fn.parallel == parallel
    threads = set(
        workers_for(torch.device("cpu"), grad_fn.parallel).map(lambda part: threading.current_thread(), range(3))
    )
    assert (threads == {threading.current_thread()}) == (not parallel or torch.get_num_threads() == 1)


def test_a_fault_in_a_worker_reaches_the_caller():
    def fail(part):
        if part == 2:
            raise ValueError("part 2")

    with pytest.raises(ValueError, match="part 2"):
        list(Workers(2).map(fail, range(4)))


def test_the_sum_of_clipped_gradients_has_the_same_bits_each_time():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.GroupNorm(2, 4), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(64, 3)
    )
    inputs, targets = torch.randn(40, 1, 6, 6), torch.randint(3, (40,))
    loss = torch.nn.CrossEntropyLoss(reduction="none")
    grad_fn = clipped_grad(model, loss, clipping_norm=1.0, microbatch_size=5, engine="graph")
    list(Workers(2).map(lambda part: grad_fn(inputs[:5], targets[:5]), range(1)))  # methods are chosen

    def total():
        parts = Workers(2).map(lambda rows: grad_fn(inputs[rows], targets[rows]).grad_sum, torch.arange(40).split(5))
        return _sum(parts)

    first = total()
    assert all(torch.equal(first[name], value) for _ in range(5) for name, value in total().items())
    alone = _sum(grad_fn(inputs[rows], targets[rows]).grad_sum for rows in torch.arange(40).split(5))
    torch.testing.assert_close(first, alone)


def _sum(parts):
    out = {}
    for part in parts:
        for name, value in part.items():
            out[name] = out[name] + value if name in out else value
    return out
