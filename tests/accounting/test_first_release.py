"""A Gaussian release of all examples beside subsampled updates: never below the truth, by either accountant."""

import math

import numpy as np
import pytest
from scipy.stats import norm

from sfumato.accounting.accountants import EpsilonCurve, epsilon
from sfumato.accounting.attacker import attacker
from sfumato.accounting.calibration import solve_batch_size, solve_noise_multiplier, solve_num_steps
from sfumato.accounting.gaussian import epsilon_gaussian
from sfumato.accounting.mechanism import Mechanism
from sfumato.accounting.pld import epsilon_pld
from sfumato.accounting.rdp import epsilon_rdp
from sfumato.accounting.selection import Selection
from sfumato.errors import InputError
from sfumato.run_folder import entries
from tests.accounting import truth

N = 10_000
# q, sigma, T, delta, sigma_0
SETTINGS = [
    (0.1, 3.0, 100, 1e-5, 2.0),
    (0.1, 3.0, 100, 1e-5, 10.0),
    (0.25, 20.0, 400, 1e-6, 8.0),
    (0.01, 0.8, 1000, 1e-5, 30.0),
    (0.5, 10.0, 1, 1e-5, 1.0),
    (0.9, 30.0, 50, 1e-8, 4.0),
    (0.001, 1.0, 20_000, 1e-6, 4.0),
]


def mechanism_of(q, sigma, steps, first, images=1):
    return Mechanism(N, round(q * N), sigma, steps, images_per_unit=images, first_release_noise=first)


@pytest.mark.parametrize(("q", "sigma", "steps", "delta", "first"), SETTINGS)
def test_epsilon_lies_between_exact_and_two_per_cent_more(q, sigma, steps, delta, first):
    exact = truth.epsilon(q, sigma, steps, delta, first_mu=1 / first)
    found = epsilon(mechanism_of(q, sigma, steps, first), delta)
    assert found.epsilon_pld is not None and exact <= found.epsilon <= 1.02 * exact
    assert found.epsilon <= found.epsilon_rdp
    alone = epsilon(mechanism_of(q, sigma, steps, None), delta).epsilon
    assert found.epsilon > max(alone, epsilon_gaussian(1 / first, delta))


def test_the_truth_agrees_with_what_two_gaussians_are_together():
    exact = truth.epsilon_of_gaussian(math.hypot(math.sqrt(30) / 8, 1 / 3), 1e-5)
    assert truth.epsilon(1.0, 8.0, 30, 1e-5, first_mu=1 / 3) == pytest.approx(exact, rel=1e-9)


def test_without_sampling_it_is_one_gaussian():
    exact = truth.epsilon_of_gaussian(math.hypot(math.sqrt(30) / 8, 1 / 3), 1e-5)
    assert exact <= epsilon(mechanism_of(1, 8.0, 30, 3.0), 1e-5).epsilon <= exact * (1 + 1e-8)
    nearly = epsilon_pld(1 - 1e-9, 8.0, 30, 1e-5, first_mu=1 / 3).epsilon
    assert exact <= nearly <= 1.002 * exact


def test_before_the_first_update_it_is_what_the_release_alone_spends():
    exact = truth.epsilon_of_gaussian(1 / 3, 1e-5)
    for sigma in (1.0, 0.0):  # which no update has used
        assert exact <= epsilon(mechanism_of(0.1, sigma, 0, 3.0), 1e-5).epsilon <= exact * (1 + 1e-8)
    by_rdp = epsilon(mechanism_of(0.1, 1.0, 0, 3.0), 1e-5, "rdp")
    assert by_rdp.epsilon > exact and by_rdp.epsilon_pld is None
    assert epsilon(mechanism_of(0.1, 1.0, 0, None), 1e-5).epsilon == 0
    assert epsilon(mechanism_of(0.1, 1.0, 5, 1e-9), 1e-5).epsilon == math.inf


@pytest.mark.parametrize(("q", "sigma", "steps", "delta", "first"), SETTINGS[:3])
def test_by_rdp_divergences_add_up_at_each_order(q, sigma, steps, delta, first):
    def at(order):
        by_steps = truth.epsilon_rdp(q, sigma, steps, delta, order)
        return by_steps + order / (2 * first**2)

    best = min(at(order) for order in np.geomspace(1.5, 40, 12))
    found = epsilon_rdp(q, sigma, steps, delta, first_mu=1 / first)
    assert found <= best * (1 + 1e-6)
    assert found >= truth.epsilon(q, sigma, steps, delta, first_mu=1 / first)


@pytest.mark.parametrize("images", [2, 3])
def test_a_person_moves_the_release_by_all_of_their_images(images):
    q, sigma, steps, delta, first = 0.1, 6.0, 100, 1e-5, 8.0
    exact = truth.epsilon(q, sigma, steps, delta, images, first_mu=images / first)
    found = epsilon(mechanism_of(q, sigma, steps, first, images), delta).epsilon
    assert exact <= found <= 1.02 * exact
    full = epsilon(mechanism_of(1, sigma, steps, first, images), delta).epsilon
    assert full == epsilon_gaussian(images * math.hypot(math.sqrt(steps) / sigma, 1 / first), delta)
    alone = epsilon(mechanism_of(q, sigma, 0, first, images), delta).epsilon
    assert alone == pytest.approx(epsilon_gaussian(images / first, delta), rel=1e-12)


def test_what_an_attacker_can_tell_lies_between_the_parts_and_their_sum():
    both = attacker(mechanism_of(0.1, 3.0, 100, 3.0))
    steps, first = attacker(mechanism_of(0.1, 3.0, 100, None)), attacker(mechanism_of(0.1, 3.0, 0, 3.0))
    assert both.source == "pld"
    assert first.advantage == pytest.approx(2 * norm.cdf(1 / 6) - 1)
    assert max(steps.advantage, first.advantage) < both.advantage < steps.advantage + first.advantage
    full = attacker(mechanism_of(1, 8.0, 30, 3.0))
    assert full.advantage == pytest.approx(2 * norm.cdf(math.hypot(math.sqrt(30) / 8, 1 / 3) / 2) - 1)


def test_what_an_attacker_can_tell_is_seen_where_they_try():
    """The likelihood ratio test on made-up outputs, in both directions, never beats the bound."""
    q, sigma, steps, first, count = 0.2, 2.0, 20, 2.0, 200_000
    generator = np.random.default_rng(0)

    def losses(with_it):
        drawn = generator.random((count, steps)) < q if with_it else np.zeros((count, steps))
        x = drawn + sigma * generator.standard_normal((count, steps))
        y = with_it + first * generator.standard_normal(count)
        of_steps = np.log1p(q * np.expm1((x - 0.5) / sigma**2)).sum(1)
        return of_steps + (y - 0.5) / first**2

    without, with_it = losses(False), losses(True)
    bound = attacker(mechanism_of(q, sigma, steps, first))
    reached = (with_it > 0).mean() - (without > 0).mean()  # the best threshold for total variation
    assert reached - 4 / math.sqrt(count) < bound.advantage < reached * 1.03
    rate = max((with_it > np.quantile(without, 0.99)).mean(), (without < np.quantile(with_it, 0.01)).mean())
    assert rate * 0.97 < bound.true_positives[0] < rate * 1.05


def test_a_curve_begins_with_the_release_and_never_falls():
    curve = EpsilonCurve(mechanism_of(0.1, 3.0, 100, 3.0), 1e-5)
    values = [curve.at(step) for step in range(0, 101, 10)]
    assert epsilon_gaussian(1 / 3, 1e-5) <= values[0] <= epsilon(mechanism_of(0.1, 3.0, 0, 3.0), 1e-5).epsilon_rdp
    assert values == sorted(values) and values[-1] == curve.spent.epsilon


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_what_is_solved_for_leaves_the_release_its_share(accountant):
    budget = {"target_epsilon": 2.0, "delta": 1e-5, "accountant": accountant, "first_release_noise": 5.0}
    spent = {"num_examples": N, "num_steps": 100}
    sigma = solve_noise_multiplier(batch_size=1000, **spent, **budget)
    within = mechanism_of(0.1, sigma, 100, 5.0)
    assert epsilon(within, 1e-5, accountant).epsilon <= 2.0
    assert epsilon(within.replace(noise_multiplier=0.998 * sigma), 1e-5, accountant).epsilon > 2.0
    steps = solve_num_steps(num_examples=N, batch_size=1000, noise_multiplier=sigma, **budget)
    assert 100 <= steps < 103
    assert solve_batch_size(noise_multiplier=sigma, **spent, **budget) in range(1000, 1003)
    with pytest.raises(InputError, match="epsilon"):
        solve_noise_multiplier(batch_size=1000, **spent, **{**budget, "first_release_noise": 1.0})


def test_releases_that_were_drawn_afresh_count_together():
    first = mechanism_of(0.1, 3.0, 0, 4.0)
    line = entries.run_line("00", first, 1.0, "")
    lines = [line, entries.first_session_line({}), entries.step_line(0, 0, None)]
    lines += [entries.next_session_line(lines[1], 0, 0, {}), entries.step_line(1, 0, None)]
    lines += [entries.step_line(1, step, None) for step in (1, 2, 3)]
    chained = [{**line, "prev": "", "hash": ""} for line in lines]
    spent = entries.spent_mechanism(chained)
    assert spent.num_steps == 3 and spent.first_release_noise == pytest.approx(4 / math.sqrt(2))
    assert entries.spent_mechanism(chained[:2]).first_release_noise is None
    chained[0]["first_release_noise"] = None
    with pytest.raises(InputError, match="release that its run has not"):
        entries.spent_mechanism(chained)


def test_where_no_epsilon_is_known_it_is_refused_by_name():
    with pytest.raises(InputError, match="first release"):
        epsilon(mechanism_of(0.1, 3.0, 100, 3.0), 1e-5, "pld", Selection(5.0, 0.0, None))
    for wrong in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(InputError, match="first_release_noise"):
            mechanism_of(0.1, 3.0, 100, wrong)
