import os
import tracemalloc
from unittest.mock import Mock

import numpy as np
import pytest
from scipy import stats

from sfumato.accounting.mechanism import Mechanism
from sfumato.data.sampling import Shuffling, poisson_batch
from sfumato.randomness import Stream
from tests.data.conftest import refused


def draws(mechanism, num_steps):
    included = np.zeros((num_steps, mechanism.num_examples), dtype=bool)
    for step in range(num_steps):
        included[step, poisson_batch(mechanism, Stream(os.urandom(32)))] = True
    return included


def test_no_poisson_batch_is_drawn_for_a_mechanism_of_shuffled_ones():
    shuffled = Mechanism(200, 37, 1.0, 1, sampling="shuffled")
    refused("a Poisson batch is none of", poisson_batch, shuffled, Stream(os.urandom(32)))


def test_every_example_is_included_with_probability_q():
    mechanism = Mechanism(200, 37, 1.0, 1)
    counts = draws(mechanism, 4000).sum(0)
    expected = 4000 * mechanism.sampling_prob
    statistic = ((counts - expected) ** 2 / (expected * (1 - mechanism.sampling_prob))).sum()
    assert stats.chi2.sf(statistic, 200) > 1e-6
    wrong = ((counts - expected * 1.05) ** 2 / (expected * (1 - mechanism.sampling_prob))).sum()
    assert stats.chi2.sf(wrong, 200) < 1e-6  # the test sees a probability that is 5 % off


def test_batch_sizes_are_binomial():
    sizes = draws(Mechanism(100, 10, 1.0, 1), 5000).sum(1)
    observed = np.bincount(np.clip(sizes, 3, 18), minlength=19)[3:]
    edges = stats.binom(100, 0.1)
    expected = 5000 * np.array([edges.cdf(3), *edges.pmf(np.arange(4, 18)), edges.sf(17)])
    assert stats.chisquare(observed, expected).pvalue > 1e-6


def test_examples_are_included_independently_of_one_another_and_of_other_steps():
    included = draws(Mechanism(60, 20, 1.0, 1), 6000).astype(float)
    standardised = (included - 1 / 3) / np.sqrt(2 / 9)
    between_examples = (standardised.T @ standardised / 6000)[np.triu_indices(60, 1)]
    between_steps = (standardised[1:] * standardised[:-1]).mean()
    assert np.abs(between_examples).max() < 6 / np.sqrt(6000)
    assert abs(between_steps) < 5 / np.sqrt(6000 * 60)


def test_with_q_equal_to_one_every_example_is_drawn_at_every_step():
    stream = Stream(os.urandom(32))
    for _ in range(50):
        assert poisson_batch(Mechanism(10, 10, 1.0, 1), stream).tolist() == list(range(10))


@pytest.mark.parametrize("batch_size", [1, 2])
def test_of_all_words_no_more_than_q_include_an_example(batch_size):
    """The guarantee to its last bit: with the floor of 2^64 q words the probability is q at most, with one more it is
    above q.
    """
    included = 2**64 * batch_size // 3
    words = Mock(uint64=Mock(return_value=np.array([included - 1, included, 0], dtype=np.uint64)))
    assert poisson_batch(Mechanism(3, batch_size, 1.0, 1), words).tolist() == [0, 2]
    words.uint64.assert_called_once_with(3)
    assert 3 * included <= 2**64 * batch_size < 3 * (included + 1)


@pytest.mark.parametrize("num_examples, batch_size", [(10, 3), (7, 7), (5, 4)])
def test_a_shuffled_epoch_visits_every_example_once(num_examples, batch_size):
    key, orders = os.urandom(24), []
    stream_of = lambda epoch: orders.append(epoch) or Stream(key + epoch.to_bytes(8, "little"))  # noqa: E731
    shuffling = Shuffling(num_examples, stream_of)
    batches = [shuffling.batch(batch_size, step) for step in range(1, 3 * num_examples + 1)]
    visits = np.concatenate(batches)
    assert all(len(batch) == batch_size for batch in batches)
    for epoch in range(3 * batch_size):
        assert sorted(visits[epoch * num_examples : (epoch + 1) * num_examples]) == list(range(num_examples))
    assert orders == list(range(3 * batch_size))  # each order is drawn once
    assert np.array_equal(shuffling.batch(batch_size, 2), batches[1])  # a resumed run meets the same ones


def test_one_order_alone_is_kept():
    tracemalloc.start()
    shuffling = Shuffling(100_000, lambda epoch: Stream(bytes(31) + bytes([epoch])))
    for step in range(1, 8):
        shuffling.batch(70_000, step)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 1.5 * 8 * 100_000  # int64
