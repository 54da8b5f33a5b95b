"""Keeping the best of a random number of runs, against the values of another library and simulation."""

import math

import numpy as np
import pytest
from scipy import special

from sfumato.accounting import accountants, rdp
from sfumato.accounting.mechanism import Mechanism
from sfumato.accounting.selection import Selection, epsilon_of_best
from sfumato.errors import InputError

RUN = Mechanism(60_000, 256, 1.1, 2_000)
DELTA = 1e-5


@pytest.mark.parametrize("shape", [0.0, 2.5])
def test_dp_accounting_agrees_at_the_same_orders(shape):
    from dp_accounting import dp_event
    from dp_accounting.rdp import RdpAccountant

    one = dp_event.SelfComposedDpEvent(
        dp_event.PoissonSampledDpEvent(256 / 60_000, dp_event.GaussianDpEvent(1.1)), 2_000
    )
    theirs = RdpAccountant().compose(dp_event.RepeatAndSelectDpEvent(one, 10, shape)).get_epsilon(DELTA)
    ours = epsilon_of_best(RUN, DELTA, Selection(10, shape))
    assert 0.97 * theirs < ours <= theirs * 1.001


def test_one_trial_costs_one_run_and_ten_less_than_ten():
    one = accountants.epsilon(RUN, DELTA, "rdp").epsilon
    assert 1.041 < one <= 1.0421  # at whole orders 1.0421
    ten = accountants.epsilon(RUN.replace(num_steps=20_000), DELTA, "rdp").epsilon
    assert ten == pytest.approx(3.146, abs=2e-3)
    for shape in (0.0, 1.0):
        costs = [epsilon_of_best(RUN, DELTA, Selection(mean, shape)) for mean in (1.5, 3, 10, 100)]
        assert one < costs[0] and costs == sorted(costs) and costs[2] < ten


def test_distributions_that_nobody_can_draw_are_refused():
    for mean, shape in ((0.5, 1.0), (math.inf, 1.0), (10, -1.0), (10, math.inf), (10, math.nan)):
        with pytest.raises(InputError, match="number of trials must"):
            Selection(mean, shape)
    for mean, shape in ((1000.0, -0.99), (2.0, -0.99), (10.0, 1e300), (1e6, -0.75)):
        with pytest.raises(InputError, match="number of trials") as refusal:
            Selection(mean, shape)
        assert "\n" not in str(refusal.value)


def test_a_score_costs_the_worse_of_training_and_scoring_never_both():
    """An image is trained on or held out."""
    training = epsilon_of_best(RUN, DELTA, Selection(10, 0.0))
    assert epsilon_of_best(RUN, DELTA, Selection(10, 0.0, 1e6)) == training
    scoring = epsilon_of_best(RUN.replace(num_steps=0), DELTA, Selection(10, 0.0, 0.5))
    both = epsilon_of_best(RUN, DELTA, Selection(10, 0.0, 0.5))
    assert both >= max(training, scoring) * (1 - 1e-9)
    assert both <= 1.02 * max(training, scoring)


def _least(mu, delta, mean, shape, score_mu):
    """By Theorem 2 in closed form, without sampling: the least over both orders, of 40,000 each."""
    orders = 1 + np.geomspace(1e-4, 1e7, 40_000)
    divergences = np.maximum(mu, score_mu) ** 2 * orders / 2
    grid = np.geomspace(1e-12, 1 - 1e-12, 400_000)  # gamma, by a table of its mean
    means = (1 / grid - 1) / np.log(1 / grid) if shape == 0 else shape * (1 - grid) / (grid * (1 - grid**shape))
    gamma = np.exp(np.interp(-math.log(mean), -np.log(means), np.log(grid)))
    helped = ((1 - 1 / orders) * divergences + math.log(1 / gamma) / orders).min()
    others = (1 + shape) * min(math.log(1 / gamma), helped)
    converted = np.log1p(-1 / orders) + (math.log(mean) - math.log(delta) - np.log(orders)) / (orders - 1)
    return (divergences + others + converted).min()


@pytest.mark.parametrize(
    ("sigma", "steps", "shape", "score_noise"),
    [(2.0, 1, -0.5, None), (2.0, 1, 1.0, 5.0), (30.0, 100, 0.0, None), (30.0, 100, 100.0, 5.0), (2.0, 0, 0.0, 5.0)],
)
def test_few_orders_are_as_good_as_very_many(sigma, steps, shape, score_noise):
    """Every batch is all images, so that Renyi divergences are known: neither below the least of 40,000 orders, nor
    above.
    """
    full, selection = Mechanism(1_000, 1_000, sigma, steps), Selection(30.0, shape, score_noise)
    least = max(0.0, _least(math.sqrt(steps) / sigma, 1e-5, 30.0, shape, 1 / score_noise if score_noise else 0.0))
    found = epsilon_of_best(full, 1e-5, selection)
    assert least * (1 - 1e-6) - 1e-9 <= found <= least * (1 + 1e-5) + 1e-9


@pytest.mark.parametrize("sigma", [0.02, 1e6])
def test_no_noise_makes_the_integral_long(sigma, monkeypatch):
    """At sigma = 1e6 orders up to 1e13 once asked for 7 GB each."""
    lengths, grid = [], rdp._grid
    monkeypatch.setattr(rdp, "_grid", lambda *numbers: lengths.append(len(grid(*numbers)[0])) or grid(*numbers))
    assert epsilon_of_best(RUN.replace(noise_multiplier=sigma), DELTA, Selection(10, 0.0)) >= 0.0
    assert max(lengths) < 200_000


def test_no_noise_or_next_to_none_bounds_nothing_and_no_step_costs_nothing():
    assert epsilon_of_best(RUN.replace(num_steps=0), DELTA, Selection(10, 1.0)) == 0.0
    for mechanism, selection in [
        (RUN.replace(noise_multiplier=0.0), Selection(10, 1.0)),
        (RUN.replace(noise_multiplier=1e-12), Selection(10, 0.0)),
        (RUN, Selection(10, 0.0, 1e-200)),
        (RUN.replace(num_steps=0), Selection(10, 0.0, 1e-9)),
    ]:
        assert epsilon_of_best(mechanism, DELTA, selection) == math.inf
        spent = accountants.epsilon(mechanism, DELTA, selection=selection)
        assert spent.epsilon == math.inf and "no finite epsilon" in spent.note


@pytest.mark.parametrize(
    ("mean", "shape"),
    [(1.0000000000001, 0.0), (1.001, -0.9), (50.0, 1e-300), (50.0, 1.0), (100.0, 1e6)],
)
def test_probabilities_of_all_numbers_of_trials_sum_to_one_and_have_the_stated_mean(mean, shape):
    """By the places where `draw` goes from one number to the next, so that it is the distribution that is drawn
    from.
    """
    selection = Selection(mean, shape)
    assert math.exp(selection.log_mean) == pytest.approx(mean, rel=1e-9)
    uniforms = (np.arange(4_000) + 0.5) / 4_000
    drawn = np.array([selection.draw(uniform) for uniform in uniforms])
    assert (np.diff(drawn) >= 0).all()
    counts = np.arange(1, 10_000)
    # Definition 1 without its constant, which the sum gives: at shape 0 Gamma(k) / k! = 1 / k
    log_p = counts * math.log(-math.expm1(selection.log_gamma))
    log_p += special.gammaln(counts + shape) - special.gammaln(counts + 1)
    below = np.cumsum(np.exp(log_p - special.logsumexp(log_p)))
    expected = counts[np.searchsorted(below, uniforms, side="right").clip(max=len(counts) - 1)]
    assert np.mean(drawn != expected) < 2e-3
