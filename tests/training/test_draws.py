"""Each update has random numbers of its own, from fresh bytes; those of a public seed follow from it alone."""

import numpy as np
import pytest

from sfumato.accounting.mechanism import Mechanism
from sfumato.data.views import Views
from sfumato.randomness import Streams
from sfumato.training.step import Draws

MECHANISM, VIEWS, EVERY = Mechanism(400, 100, 1.0, 5), Views("flip", 2, 0), np.arange(400)


def draws(seed=None, mechanism=MECHANISM):
    return Draws(mechanism, VIEWS, Streams(seed))


def bits(drawn, release):
    randomness = drawn.of_update(release)
    return randomness.indices.tobytes(), randomness.view_bits[EVERY].tobytes(), randomness.model_key


def test_no_two_updates_share_a_bit_even_where_one_is_repeated():
    """A release that a crash lost is drawn anew, and so is every other in a copy of the run."""
    seen = [bits(drawn, release) for drawn in (draws(), draws()) for release in (1, 1, 2)]
    for parts in zip(*seen, strict=True):
        assert len(set(parts)) == len(seen)
    one = draws()
    words = [one.noise(release).uint64(64) for release in (1, 1, 2)]
    assert abs(np.unpackbits((words[0] ^ words[1]).view(np.uint8)).mean() - 0.5) < 0.05
    assert abs(np.unpackbits((words[0] ^ words[2]).view(np.uint8)).mean() - 0.5) < 0.05


def test_a_public_seed_gives_all_of_it_again_whatever_was_drawn_before():
    one, other = draws(3), draws(3)
    one.of_update(1)
    assert bits(one, 2) == bits(other, 2)
    assert one.noise(2).bytes(64) == other.noise(2).bytes(64) != one.noise(1).bytes(64)
    assert bits(draws(4), 2) != bits(draws(3), 2)


def test_runs_of_one_seed_share_views_dropout_and_noise_whatever_their_batch():
    """Common random numbers."""
    one, other = draws(3), draws(3, MECHANISM.replace(batch_size=40))
    a, b = one.of_update(1), other.of_update(1)
    assert (a.view_bits[EVERY] == b.view_bits[EVERY]).all() and a.model_key == b.model_key
    assert set(b.indices) < set(a.indices)
    assert one.noise(1).bytes(32) == other.noise(1).bytes(32)


@pytest.mark.parametrize("seed", [None, 5])
def test_shuffled_batches_visit_every_example_once_an_epoch(seed):
    drawn = draws(seed, MECHANISM.replace(sampling="shuffled"))
    epoch = np.concatenate([drawn.of_update(release).indices for release in range(1, 5)])
    assert sorted(epoch) == list(range(400))
    assert list(drawn.of_update(5).indices) != list(epoch[:100])
