"""What counts as a gain."""

import numpy as np
import pytest

from sfumato.scaling.search.significance import gain

SEEDS, CANDIDATES = 3, 6


def studies(count, improvement, seed=0):
    """Accuracies of a current setting and of candidates, one of which is better, with a common level for each seed."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        levels = 0.8 + 0.02 * rng.standard_normal(SEEDS)
        table = levels + 0.004 * rng.standard_normal((CANDIDATES + 1, SEEDS))
        table[3] += improvement
        yield list(table[0]), [list(row) for row in table[1:]]


def test_chance_alone_counts_as_a_gain_in_at_most_five_of_a_hundred_searches():
    false = sum(gain(current, candidates).counts for current, candidates in studies(4000, 0.0))
    assert 0.005 < false / 4000 < 0.055


def test_a_gain_of_eight_times_the_spread_is_found_though_levels_of_seeds_differ_by_as_much():
    found = [gain(current, candidates) for current, candidates in studies(1000, 0.032)]
    assert sum(one.counts and one.best == 2 for one in found) > 950


def test_one_seed_leaves_the_spread_unknown_and_the_best_mean_wins():
    found = gain([0.8], [[0.7], [0.81], None])
    assert (found.best, found.needed, found.counts) == (1, None, True)
    assert found.gain == pytest.approx(0.01)


def test_nothing_better_is_no_gain():
    assert not gain([0.8, 0.81], [[0.7, 0.72], [0.75, 0.6]]).counts
    assert not gain([0.8, 0.81], [None, None]).counts
    assert not gain([0.8, 0.81], []).counts


def test_a_candidate_that_fails_does_not_hide_the_gain_of_another():
    """Its spread is fifty times that of the others."""
    assert gain([0.80, 0.81, 0.79], [[0.1, 0.5, 0.3], [0.83, 0.84, 0.821]]).counts
