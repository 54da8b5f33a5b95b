"""What an attacker can tell, against independent truths: closed forms, and losses added up by FFT here."""

import math

import numpy as np
import pytest
from scipy.signal import fftconvolve
from scipy.stats import norm

from sfumato.accounting import attacker as attacking
from sfumato.accounting.accountants import epsilon
from sfumato.accounting.attacker import attacker, true_positive_rates
from sfumato.accounting.mechanism import Mechanism
from sfumato.accounting.selection import Selection


def added(one, other):
    """The sum of two losses around zero, without tails that are the FFT's own rounding."""
    total = fftconvolve(one, other).clip(min=0)
    middle = len(total) // 2
    reach = int(np.abs(np.flatnonzero(total > 1e-16) - middle).max())
    return total[middle - reach : middle + reach + 1]


def by_convolution(q, sigma, num_steps, rates):
    """The same of many updates: losses on a fine grid, rounded to the nearest, added up by FFT."""
    x = np.linspace(-12 * sigma, 12 * sigma + 1, 400_001)
    loss = np.log1p(q * np.expm1((x - 0.5) / sigma**2))
    width = 2e-4 * max(1.0, math.sqrt(num_steps) * q / sigma)
    middle = int(math.ceil(max(-loss.min(), loss.max()) / width))
    density = norm.pdf(x / sigma)
    worst_advantage, worst = 0.0, np.zeros(len(rates))
    for sign in (1, -1):  # the losses of the upper distribution against the lower one
        upper = density * np.exp(loss) if sign == 1 else density
        mass = np.bincount(np.rint(sign * loss / width).astype(int) + middle, upper, 2 * middle + 1)
        mass /= mass.sum()
        total, power, rest = np.array([1.0]), mass, num_steps
        while rest:
            if rest & 1:
                total = added(total, power)
            power = added(power, power) if rest > 1 else power
            rest //= 2
        losses = (np.arange(len(total)) - len(total) // 2) * width
        other = total * np.exp(-losses.clip(-700))
        power_of_test, size = np.cumsum(total[::-1]), np.cumsum(other[::-1])
        worst_advantage = max(worst_advantage, float((power_of_test - size).max()))
        worst = np.maximum(worst, np.interp(rates, size, power_of_test))
    return worst_advantage, worst


def told(found):
    return found.true_positives_at_1_percent, found.true_positives_at_0_1_percent


SETTINGS = [(0.25, 3.881, 150), (0.02, 1.0, 200), (0.05, 0.9, 30), (0.15, 4.0, 500)]


@pytest.mark.parametrize(("q", "sigma", "num_steps"), SETTINGS)
def test_many_updates_are_within_a_hundredth_above_and_never_below(q, sigma, num_steps):
    mechanism, curve = Mechanism(10_000, round(10_000 * q), sigma, num_steps), np.linspace(1e-4, 1, 40)
    found = attacker(mechanism)
    advantage, exact = by_convolution(q, sigma, num_steps, [0.01, 0.001, *curve])
    # The truth here is itself rounded, by less than 1e-4.
    assert advantage * (1 - 1e-4) <= found.advantage <= advantage * 1.01
    rates = np.array([*told(found), *true_positive_rates(mechanism, curve)])
    assert (exact * (1 - 1e-4) <= rates).all() and (rates <= exact * 1.01).all()
    assert (np.diff(rates[2:]) >= 0).all() and (rates[2:] >= curve).all() and rates[-1] == 1


@pytest.mark.parametrize(("sigma", "num_steps"), [(1.0, 1), (5.0, 20)])
def test_without_sampling_it_is_the_gaussian_s(sigma, num_steps):
    found, mu = attacker(Mechanism(100, 100, sigma, num_steps)), math.sqrt(num_steps) / sigma
    assert found.advantage == pytest.approx(2 * norm.cdf(mu / 2) - 1)
    exact = norm.cdf(norm.ppf(0.01) + mu)
    assert exact <= found.true_positives_at_1_percent <= 1.005 * exact


@pytest.mark.parametrize(("q", "sigma", "num_steps"), SETTINGS[:2])
def test_where_no_pld_certifies_pairs_by_renyi_dp_bound_it_from_above(q, sigma, num_steps, monkeypatch):
    mechanism = Mechanism(10_000, round(10_000 * q), sigma, num_steps)
    tight = attacker(mechanism)
    monkeypatch.setattr("sfumato.accounting.attacker.deltas_pld", lambda *numbers: None)
    monkeypatch.setattr("sfumato.accounting.attacker._trade_off", attacking._trade_off.__wrapped__)
    loose = attacker.__wrapped__(mechanism)  # the answer before is remembered
    assert loose.source == "pairs" and tight.advantage <= loose.advantage <= 1
    assert all(a <= b for a, b in zip(told(tight), told(loose), strict=True))
    one = epsilon(mechanism, 1e-5, "rdp").epsilon  # far more than what one pair says
    assert loose.advantage <= 1 - 2 * (1 - 1e-5) / (math.exp(one) + 1)
    selected = attacker(mechanism, Selection(mean=10.0, shape=0.0))
    assert selected.source == "pairs" and selected.advantage >= loose.advantage


def test_nothing_spent_tells_nothing_and_no_noise_tells_all():
    assert attacker(Mechanism(100, 10, 1.0, 0)).advantage == 0
    assert told(attacker(Mechanism(100, 10, 0.0, 5))) == (1.0, 1.0)


def test_a_person_s_images_together_tell_more_than_one_and_less_than_all_of_them_always_drawn(images=4):
    mechanism = Mechanism(10_000, 800, 3.0, 100)
    one, person = attacker(mechanism), attacker(mechanism.replace(images_per_unit=images))
    always = attacker(Mechanism(10_000, 10_000, 3.0, 100, images_per_unit=images))
    assert one.advantage < person.advantage < always.advantage and person.source == "pld"


def test_a_noisy_score_is_told_though_no_step_was_taken():
    """The best of several runs is named by it: of no steps at all the answer was 50 %."""
    selection = Selection(5.0, 0.0, 2.0)
    without, one = Mechanism(1_000, 100, 1.0, 0), Mechanism(1_000, 100, 1e6, 1)
    found, nearly = attacker(without, selection), attacker(one, selection)
    assert 0.5 < found.accuracy <= nearly.accuracy < found.accuracy + 0.01
    assert attacker(without).accuracy == 0.5


@pytest.mark.parametrize("mechanism", [Mechanism(50, 50, 3.0, 1), Mechanism(50, 10, 1.0, 2)])
def test_who_picks_one_of_as_many_candidates_is_right_no_more_often_than_stated_and_almost_as_often(mechanism):
    """Everybody has a coordinate of their own, one takes part, and the largest likelihood ratio is named."""
    rng, games, sigma, q = np.random.default_rng(0), 40_000, mechanism.noise_multiplier, mechanism.sampling_prob
    seen = rng.normal(0, sigma, (games, mechanism.num_steps, 50))
    seen[:, :, 0] += rng.random((games, mechanism.num_steps)) < q
    scores = np.log1p(q * np.expm1((2 * seen - 1) / (2 * sigma**2))).sum(1)
    right = (scores.argmax(1) == 0).mean()
    bound = attacker(mechanism).singled_out
    spread = math.sqrt(bound * (1 - bound) / games)
    assert 0.5 * bound < right <= bound + 5 * spread and bound > 1.5 / 50
    assert attacker(mechanism).candidates == 50


def test_of_people_there_are_at_least_as_many_as_the_images_need():
    found = attacker(Mechanism(1001, 100, 3.0, 10, images_per_unit=4))
    assert found.candidates == 251 and 1 / 251 < found.singled_out < found.true_positives_at_1_percent
