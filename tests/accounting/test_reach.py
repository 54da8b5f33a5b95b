"""Noise that is drawn ends somewhere; what that costs is never more than a hundredth of delta."""

import math

import numpy as np
import pytest
from scipy.stats import norm

from sfumato.accounting.mechanism import Mechanism
from sfumato.accounting.reach import REACH, refuse_beyond_reach, unreachable
from sfumato.errors import InputError


def test_the_reach_is_that_of_the_noise():
    from sfumato.training.noise import standard_normal

    words = np.zeros((1, 2, 1), dtype=np.uint64)  # the longest radius, at angle 0
    assert float(standard_normal(words).max()) == pytest.approx(REACH, rel=1e-12)


@pytest.mark.parametrize("spread", [1, 10, 10_000])
@pytest.mark.parametrize("sigma", [0.2, 0.5, 2.0])
def test_what_is_counted_is_at_least_what_lies_beyond(sigma, spread):
    """The mass of a shifted box of noise outside of the box, by its coordinates."""
    shift = 1 / sigma / math.sqrt(spread)
    beyond = -math.expm1(spread * math.log1p(-(norm.sf(REACH - shift) - norm.sf(REACH))))
    assert beyond <= unreachable(Mechanism(100, 100, sigma, 1)) <= 1


def test_a_run_of_the_papers_is_far_from_it_and_the_share_is_held():
    refuse_beyond_reach(Mechanism(50_000, 4096, 3.0, 2500), 1e-5)
    refuse_beyond_reach(Mechanism(60_000, 512, 0.5, 20_000), 1e-6)
    with pytest.raises(InputError, match="more noise"):
        refuse_beyond_reach(Mechanism(1000, 1000, 0.15, 1), 1e-5)
    with pytest.raises(InputError, match="larger delta"):
        refuse_beyond_reach(Mechanism(1000, 10, 1.0, 10, first_release_noise=1.0), 1e-30)
