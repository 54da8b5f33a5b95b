"""The Gaussian mechanism without sampling, TAN's numbers, and where the noise that is drawn ends."""

import math

import numpy as np
import pytest
from scipy.stats import ncx2

from sfumato.accounting.accountants import epsilon
from sfumato.accounting.gaussian import (
    DENSE_REACH,
    epsilon_gaussian,
    epsilon_tan,
    mu_gaussian,
    overcharge,
    refuse_beyond_reach,
    snr,
    snr_per_step,
    unreachable,
)
from sfumato.accounting.mechanism import Mechanism
from sfumato.accounting.rdp import rdp
from sfumato.errors import InputError
from sfumato.training import noise
from tests.accounting import truth

IMAGENET = Mechanism(1_271_167, 16_384, 2.5, 71_589)


@pytest.mark.parametrize("mu", [1e-3, 1.0, 1000.0])
def test_the_analytic_gaussian_is_exact_and_rounded_up(mu):
    for delta in (1e-4, 1e-5, 1e-8):
        exact = truth.epsilon_of_gaussian(mu, delta)
        found = epsilon_gaussian(mu, delta)
        assert exact <= found <= (1 + 1e-8) * exact + 1e-12
        assert not found or mu_gaussian(found, delta) == pytest.approx(mu, rel=1e-6)


def test_the_analytic_gaussian_goes_on_where_its_root_is_lost_to_rounding():
    """mu^2 / 2 < epsilon <= mu^2 / 2 + mu sqrt(2 log(1/delta)) from mu = 30 on: the loss is N(mu^2 / 2, mu^2)."""
    for mu in (1e7, 0.99e8, 1.01e8, 1e12, 1e110):
        for delta in (1e-5, 1e-100):
            chernoff = mu**2 / 2 + mu * math.sqrt(-2 * math.log(delta))
            assert mu**2 / 2 < epsilon_gaussian(mu, delta) <= chernoff * (1 + 2e-9)


def test_the_ratios_are_those_of_the_paper():
    assert snr_per_step(IMAGENET) == pytest.approx(16_384 / 1_271_167 / (math.sqrt(2) * 2.5))
    assert snr(IMAGENET) == pytest.approx(math.sqrt(71_589) * snr_per_step(IMAGENET))
    assert snr(IMAGENET.replace(batch_size=32_768, noise_multiplier=5.0)) == pytest.approx(snr(IMAGENET))


def test_epsilon_tan_is_the_large_noise_limit_of_classic_rdp_and_underestimates_small_noise():
    q, sigma, steps, delta = 0.01, 100.0, 500_000, 8e-7
    classic = min(steps * rdp(q, sigma, a) - math.log(delta) / (a - 1) for a in np.geomspace(20, 300, 60))
    assert epsilon_tan(Mechanism(1_000_000, 10_000, sigma, steps), delta) == pytest.approx(classic, rel=1e-3)
    at_sigma_1 = Mechanism(1_803_460, 4_096, 1.0, 223_939)  # Table 21 of De et al.: epsilon 8
    assert epsilon_tan(at_sigma_1, 5e-7) < 0.85 * epsilon(at_sigma_1, 5e-7, "rdp").epsilon


def test_the_overcharge_vanishes_with_large_noise_and_grows_with_small():
    charges = []
    for scale in (1, 2, 8):
        mechanism = Mechanism(1_271_167, 4_096 * scale, 1.0 * scale, 20_000)
        charges.append(overcharge(mechanism, 8e-7, epsilon(mechanism, 8e-7).epsilon))
    assert charges[0] > 0.2 > charges[1] > 0.02 > charges[2] > -0.001


def test_without_steps_or_noise_there_is_no_ratio_to_speak_of():
    assert snr(IMAGENET.replace(num_steps=0)) == epsilon_tan(IMAGENET.replace(num_steps=0), 1e-5) == 0
    assert snr_per_step(IMAGENET.replace(noise_multiplier=0.0)) == math.inf
    assert math.isnan(overcharge(IMAGENET.replace(num_steps=0), 1e-5, 0.0))


def test_up_to_the_dense_reach_radii_of_the_noise_lie_close():
    words = np.zeros((1, 2, 1), dtype=np.uint64)  # the longest radius, at angle 0
    assert float(noise.standard_normal(words).max()) == pytest.approx(math.sqrt(2 * 96 * math.log(2)), rel=1e-12)
    first = math.exp(-(DENSE_REACH**2) / 2) * 2**95  # as a number of 95 bits
    neighbours = [math.floor(first), math.floor(first) + 1]
    words = np.array([[[number >> 32], [number & (2**32 - 1)]] for number in neighbours], dtype=np.uint64)
    words[:, 0] <<= np.uint64(1)
    one, other = noise.standard_normal(words)[:, 0, 0].tolist()
    assert one == pytest.approx(DENSE_REACH, abs=1e-3)
    assert 0 < one - other < 0.1 * 2.0**-noise._GRID_BITS / 2  # the grid is at least half of that


@pytest.mark.parametrize("sigma", [0.1, 0.15, 0.5, 2.0])
def test_what_is_counted_is_at_least_what_lies_beyond_however_a_unit_moves_the_pairs(sigma):
    """Pairs are discs: both coordinates share a radius. Evenly, and most of it in one pair."""
    counted, all_in_one = unreachable(Mechanism(100, 100, sigma, 1)), float(ncx2.sf(DENSE_REACH**2, 2, sigma**-2))
    for pairs in (1, 2, 10, 1_000, 10_000_000):
        for share_of_first in (1 / pairs, 0.5, 0.9):
            rest = (1 - share_of_first) / max(1, pairs - 1)
            shares = [share_of_first, rest] if pairs > 1 else [1.0]
            beyond = [float(ncx2.sf(DENSE_REACH**2, 2, share / sigma**2)) for share in shares]
            assert beyond[0] + sum(beyond[1:]) * (pairs - 1) <= counted * (1 + 1e-9)
    assert all_in_one <= counted <= 1.1 * all_in_one + 3e-16


def test_runs_of_the_papers_are_far_from_it_and_the_share_is_held():
    refuse_beyond_reach(Mechanism(50_000, 4096, 3.0, 2500), 1e-5)
    refuse_beyond_reach(Mechanism(1_281_167, 16_384, 2.5, 200_000), 8e-7)
    refuse_beyond_reach(Mechanism(60_000, 512, 0.5, 20_000), 1e-6)
    with pytest.raises(InputError, match="more noise"):
        refuse_beyond_reach(Mechanism(1000, 1000, 0.15, 1), 1e-5)
    with pytest.raises(InputError, match="larger delta"):
        refuse_beyond_reach(Mechanism(1000, 10, 1.0, 10), 1e-30)
