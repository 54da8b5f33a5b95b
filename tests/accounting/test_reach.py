"""Noise that is drawn ends somewhere; what that costs is never more than a hundredth of delta."""

import math

import numpy as np
import pytest
from scipy.stats import ncx2

from sfumato.accounting.mechanism import Mechanism
from sfumato.accounting.reach import DENSE_REACH, REACH, refuse_beyond_reach, unreachable
from sfumato.errors import InputError
from sfumato.training import noise


def test_the_reach_is_that_of_the_noise():
    words = np.zeros((1, 2, 1), dtype=np.uint64)  # the longest radius, at angle 0
    assert float(noise.standard_normal(words).max()) == pytest.approx(REACH, rel=1e-12)


def test_up_to_the_dense_reach_radii_lie_closer_than_a_tenth_of_the_grid():
    first = math.exp(-(DENSE_REACH**2) / 2) * 2**95  # as a number of 95 bits
    neighbours = [math.floor(first), math.floor(first) + 1]
    words = np.array([[[number >> 32], [number & (2**32 - 1)]] for number in neighbours], dtype=np.uint64)
    words[:, 0] <<= np.uint64(1)
    one, other = noise.standard_normal(words)[:, 0, 0].tolist()
    assert one == pytest.approx(DENSE_REACH, abs=1e-3)
    assert 0 < one - other < 0.1 * 2.0**-noise._GRID_BITS / 2  # the grid is at least half of that


@pytest.mark.parametrize("pairs", [1, 2, 10, 1_000, 10_000_000])
@pytest.mark.parametrize("sigma", [0.15, 0.3, 0.5, 2.0])
def test_what_is_counted_is_at_least_what_lies_beyond_however_a_unit_moves_the_pairs(sigma, pairs):
    """Pairs are discs: both coordinates share a radius. Evenly, and most of it in one pair."""
    for share_of_first in (1 / pairs, 0.5, 0.9):
        rest = (1 - share_of_first) / max(1, pairs - 1)
        shares = [share_of_first, rest] if pairs > 1 else [1.0]
        beyond = [float(ncx2.sf(DENSE_REACH**2, 2, share / sigma**2)) for share in shares]
        assert beyond[0] + sum(beyond[1:]) * (pairs - 1) <= unreachable(Mechanism(100, 100, sigma, 1)) * (1 + 1e-9)


@pytest.mark.parametrize("shift", [0.0, 0.1, 1.0, 3.0, 8.0, 10.59])
def test_one_pair_lies_beyond_as_often_as_rice_says(shift):
    count = unreachable(Mechanism(100, 100, 1 / shift if shift else 1e6, 1)) - unreachable(Mechanism(100, 100, 1e6, 1))
    exact = ncx2.sf(DENSE_REACH**2, 2, shift**2) - ncx2.sf(DENSE_REACH**2, 2, 1e-12)
    assert count == pytest.approx(exact, rel=1e-4, abs=1e-28)


def test_runs_of_the_papers_are_far_from_it_and_the_share_is_held():
    refuse_beyond_reach(Mechanism(50_000, 4096, 3.0, 2500), 1e-5)
    refuse_beyond_reach(Mechanism(1_281_167, 16_384, 2.5, 200_000), 8e-7)
    refuse_beyond_reach(Mechanism(60_000, 512, 0.5, 20_000), 1e-6)
    with pytest.raises(InputError, match="more noise"):
        refuse_beyond_reach(Mechanism(1000, 1000, 0.15, 1), 1e-5)
    with pytest.raises(InputError, match="larger delta"):
        refuse_beyond_reach(Mechanism(1000, 10, 1.0, 10, first_release_noise=1.0), 1e-30)
    for of_updates in (0.0, 1.0):
        with pytest.raises(InputError, match="larger delta"):
            refuse_beyond_reach(Mechanism(1000, 10, of_updates, 0, first_release_noise=0.1), 1e-9)
