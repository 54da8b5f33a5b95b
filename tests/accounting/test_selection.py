"""Keeping the best of a random number of runs, against the values of another library and simulation."""

import math

import numpy as np
import pytest

from sfumato.accounting import accountants
from sfumato.accounting.mechanism import Mechanism
from sfumato.accounting.selection import Selection, epsilon_of_best
from sfumato.errors import InputError

RUN = Mechanism(60_000, 256, 1.1, 2_000)
DELTA = 1e-5


@pytest.mark.parametrize(("shape", "expected"), [(0.0, 1.8276), (1.0, 2.1542), (math.inf, 2.1485)])
def test_ten_trials_in_the_mean(shape, expected):
    """dp-accounting, on its grid of orders, is a little above."""
    found = epsilon_of_best(RUN, DELTA, Selection(10, shape))
    assert expected * 0.985 < found <= expected * 1.001


@pytest.mark.parametrize("shape", [0.0, 1.0, 2.5])
def test_dp_accounting_agrees_at_the_same_orders(shape):
    from dp_accounting import dp_event
    from dp_accounting.rdp import RdpAccountant

    one = dp_event.SelfComposedDpEvent(dp_event.PoissonSampledDpEvent(256 / 60_000, dp_event.GaussianDpEvent(1.1)), 2_000)
    theirs = RdpAccountant().compose(dp_event.RepeatAndSelectDpEvent(one, 10, shape)).get_epsilon(DELTA)
    ours = epsilon_of_best(RUN, DELTA, Selection(10, shape))
    assert 0.97 * theirs < ours <= theirs * 1.001


def test_one_trial_costs_one_run_and_ten_less_than_ten():
    one = accountants.epsilon(RUN, DELTA, "rdp").epsilon
    assert 1.041 < one <= 1.0421  # at whole orders 1.0421
    ten = accountants.epsilon(RUN.replace(num_steps=20_000), DELTA, "rdp").epsilon
    assert ten == pytest.approx(3.146, abs=2e-3)
    for shape in (0.0, 1.0, math.inf):
        costs = [epsilon_of_best(RUN, DELTA, Selection(mean, shape)) for mean in (1.5, 3, 10, 100)]
        assert one < costs[0] and costs == sorted(costs) and costs[2] < ten


@pytest.mark.parametrize("shape", [-0.5, 0.0, 1.0, 3.0, math.inf])
def test_the_number_of_trials_has_its_mean_and_its_distribution(shape):
    trials = Selection(7.0, shape)
    drawn = np.array([trials.draw(uniform) for uniform in np.random.default_rng(0).random(20_000)])
    assert abs(drawn.mean() - 7.0) < 5 * drawn.std() / len(drawn) ** 0.5
    if shape == 1.0:  # geometric: P[K > k] = (1 - 1/7)^k
        assert np.mean(drawn > 5) == pytest.approx((6 / 7) ** 5, abs=0.015)
    assert drawn.min() == (0 if math.isinf(shape) else 1)


@pytest.mark.parametrize(("mean", "shape"), [(0.5, 1.0), (math.inf, 1.0), (10, -1.0), (0, math.inf), (10, math.nan)])
def test_impossible_distributions_are_refused(mean, shape):
    with pytest.raises(InputError, match="number of trials must"):
        Selection(mean, shape)


def test_no_noise_bounds_nothing_and_no_step_costs_nothing():
    assert epsilon_of_best(RUN.replace(noise_multiplier=0.0), DELTA, Selection(10, 1.0)) == math.inf
    assert epsilon_of_best(RUN.replace(num_steps=0), DELTA, Selection(10, 1.0)) == 0.0


@pytest.mark.parametrize("score_noise", [3.0, 10.0, 40.0])
def test_a_score_on_held_out_images_costs_what_selecting_among_gaussian_mechanisms_costs(score_noise):
    """Without training the score is all there is: dp-accounting's own event for it, at its own orders, is an upper bound close by."""
    from dp_accounting.dp_event import GaussianDpEvent, RepeatAndSelectDpEvent
    from dp_accounting.rdp import RdpAccountant

    ours = epsilon_of_best(RUN.replace(num_steps=0), DELTA, Selection(10, 0.0, score_noise))
    theirs = RdpAccountant().compose(RepeatAndSelectDpEvent(GaussianDpEvent(score_noise), 10, 0.0)).get_epsilon(DELTA)
    assert 0.95 * theirs <= ours <= theirs * (1 + 1e-6)


def test_a_score_costs_the_worse_of_training_and_scoring_never_both():
    """An image is trained on or held out."""
    training = epsilon_of_best(RUN, DELTA, Selection(10, 0.0))
    assert epsilon_of_best(RUN, DELTA, Selection(10, 0.0, 1e6)) == training
    scoring = epsilon_of_best(RUN.replace(num_steps=0), DELTA, Selection(10, 0.0, 0.5))
    both = epsilon_of_best(RUN, DELTA, Selection(10, 0.0, 0.5))
    assert both >= max(training, scoring) * (1 - 1e-9)
    assert both <= 1.02 * max(training, scoring)
