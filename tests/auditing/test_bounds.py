"""Bounds on epsilon from scores: they are valid, they are not empty, and they say what they assume."""

import math
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from scipy.stats import binom, norm
from sklearn.metrics import roc_auc_score

from sfumato.accounting.gaussian import epsilon_gaussian, mu_gaussian
from sfumato.auditing.bounds import audit_scores, require_enough
from sfumato.auditing.rates import advantage_bound, games_needed, log_ratio, lower_rate, perfect, power, upper_rate
from sfumato.errors import InputError

DELTA = 0.01


def by_name(result):
    return {bound.name: bound for bound in result.bounds}


def test_the_rates_of_de_et_al_give_the_bound_that_their_formula_gives():
    """10 false and 1,000 true positives of 490,000 each at 99.9 %, delta = 1/60,000."""
    error = 0.0005
    found = log_ratio(upper_rate(10, 490_000, error), lower_rate(1000, 490_000, error), 1 / 60_000)
    assert float(found) == pytest.approx(3.5635, abs=5e-5)


@pytest.mark.parametrize("count, total, error", [(0, 7, 0.025), (7, 7, 0.025), (40, 490_000, 0.0005)])
def test_an_interval_ends_where_so_many_are_just_as_unlikely_as_the_error(count, total, error):
    upper, lower = float(upper_rate(count, total, error)), float(lower_rate(count, total, error))
    if count < total:
        assert binom.cdf(count, total, upper) == pytest.approx(error, rel=1e-6)
    else:
        assert upper == 1
    if count > 0:
        assert binom.sf(count - 1, total, lower) == pytest.approx(error, rel=1e-6)
    else:
        assert lower == 0


def test_either_role_may_be_the_one_that_is_looked_for():
    """Members exchanged with the others, and guesses with them: the same rates, the same bound."""
    rng = np.random.default_rng(3)
    false, true = np.sort(rng.random((2, 100)), axis=0)
    np.testing.assert_allclose(log_ratio(false, true, DELTA), log_ratio(1 - true, 1 - false, DELTA))
    # An attack that is sure of some non-members alone: FPR 0.5, TPR 0.999.
    assert float(log_ratio(0.5, 0.999, DELTA)) == pytest.approx(math.log(0.49 / 0.001))


def test_the_advantage_is_bounded_as_in_table_8():
    for delta, printed in ((1 / 60_000, [0.46, 0.76, 0.96, 1.00]), (0.01, [0.47, 0.76, 0.96, 1.00])):
        assert [round(advantage_bound(epsilon, delta), 2) for epsilon in (1, 2, 4, 8)] == printed


def test_power_at_a_thousand_models_is_what_is_known():
    """At 99.9 %: of the best attack about .25, .8, 1.75, 3.1 at delta .01; 0, .25, 1.1, 2.2 at 1/60,000."""
    models = 1000
    for delta, known in ((0.01, [0.25, 0.8, 1.75, 3.1]), (1 / 60_000, [0, 0.25, 1.1, 2.2])):
        found = [power(models, models, 0.999, delta, float(epsilon), 0.2).tight for epsilon in (1, 2, 4, 8)]
        np.testing.assert_allclose(found, known, atol=0.22)
        assert 4.6 < power(models, models, 0.999, delta, 1.0, 0.2).perfect < 4.9


@pytest.mark.parametrize("epsilon", [0.0, 4.0])
def test_with_one_game_less_than_is_needed_no_attack_shows_epsilon(epsilon):
    needed = games_needed(epsilon, 0.95, DELTA, 0.2)
    used, fewer = needed / 2 * 0.8, (needed - 1) / 2 * 0.8
    assert perfect(fewer, fewer, 0.95, DELTA) <= epsilon < perfect(used, used, 0.95, DELTA)


def test_a_perfect_attack_shows_what_power_says():
    rng = np.random.default_rng(0)
    scores = np.concatenate([rng.random(1000), 2 + rng.random(1000)])
    asked = {"delta": DELTA, "confidence": 0.999, "nominal_epsilon": 4.0}
    result, again = (audit_scores(scores, [0] * 1000 + [1] * 1000, **asked) for _ in range(2))
    assert result.split_seed != again.split_seed  # another fifth of the games chooses
    assert result.epsilon_lower_bound == pytest.approx(result.power.perfect, abs=1e-9)
    assert (result.auc, result.advantage, result.violated) == (1, 1, True)
    assert 4.6 < result.epsilon_lower_bound < 4.9


# Mechanisms whose epsilon at DELTA is known in closed form: (epsilon, scores of audits without, with).
def gaussian(mu):
    epsilon = epsilon_gaussian(mu, DELTA)
    return epsilon, lambda rng, shape: (rng.normal(0, 1, shape), rng.normal(mu, 1, shape))


def randomised_response(epsilon_0):
    says_true = 1 / (1 + math.exp(-epsilon_0))
    epsilon = math.log((says_true - DELTA) / (1 - says_true))
    return epsilon, lambda rng, shape: (rng.random(shape) > says_true, rng.random(shape) < says_true)


def laplace(epsilon_0):
    scale = 1 / epsilon_0
    attack = lambda rng, shape: (rng.laplace(0, scale, shape), rng.laplace(1, scale, shape))  # noqa: E731
    return epsilon_0 + 2 * math.log1p(-DELTA), attack


MECHANISMS = {
    "gaussian 1": gaussian(mu_gaussian(1.0, DELTA)),
    "randomised response": randomised_response(2.0),
    "laplace": laplace(1.0),
}


def audits(name, count, games=1000, confidence=0.99):
    """The results of many audits with ``games`` on each side."""
    epsilon, attack = MECHANISMS[name]
    rng = np.random.default_rng(sum(map(ord, name)) + count)
    members = np.repeat([0, 1], games)
    for _ in range(count):
        scores = np.concatenate(attack(rng, games)).astype(float)
        yield audit_scores(scores, members, delta=DELTA, confidence=confidence, nominal_epsilon=epsilon)


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_bound_is_above_the_truth_no_more_often_than_stated(name):
    """At 99 % confidence, no significantly larger share than 1 % of bounds."""
    (epsilon, _), count = MECHANISMS[name], 1000
    found = [by_name(result) for result in audits(name, count)]
    kinds = ["clopper-pearson", "gaussian"] if name.startswith("gaussian") else ["clopper-pearson"]
    for kind in kinds:
        bounds = np.array([each[kind].epsilon or 0.0 for each in found])
        above = int((bounds > epsilon).sum())
        assert binom.sf(above - 1, count, 0.01) > 1e-4, (kind, above)
        assert bounds.mean() > (0.1 if kind == "clopper-pearson" else 0.3) * epsilon  # an empty bound is valid, too


def test_a_mechanism_that_tells_nothing_shows_something_no_more_often_than_stated():
    """At 60 %, where a threshold from the games of the bound would show something in half of all audits."""
    rng, members, count = np.random.default_rng(0), np.repeat([0, 1], 500), 500
    found = [audit_scores(rng.random(1000), members, delta=DELTA, confidence=0.6) for _ in range(count)]
    assert abs(np.mean([result.advantage for result in found])) < 0.01
    above = sum(by_name(result)["gaussian"].epsilon > 0 for result in found)
    assert binom.sf(above - 1, count, 0.25) > 1e-4  # two intervals at 20 % seldom fail together


def test_neither_the_order_of_games_nor_the_scale_of_scores_matters():
    rng = np.random.default_rng(1)
    members = rng.random(3000) < 0.5
    scores = rng.normal(size=3000) + 2 * members
    result = audit_scores(scores, members, delta=DELTA)
    order, seed = rng.permutation(3000), result.split_seed
    assert audit_scores(scores[order], members[order], delta=DELTA, split_seed=seed) == result
    moved = audit_scores(np.exp(scores), members, delta=DELTA, split_seed=seed)
    for one, other in zip(result.bounds, moved.bounds, strict=True):
        assert one.epsilon == pytest.approx(other.epsilon, rel=0.05)


def test_infinite_scores_are_the_highest_and_the_lowest():
    scores = [-np.inf] * 500 + [0.0] * 1000 + [np.inf] * 500
    result = audit_scores(scores, np.repeat([0, 1], 1000), delta=DELTA)
    assert result.epsilon_lower_bound > 3 and result.auc == pytest.approx(0.875)


def test_the_gaussian_bound_finds_a_gaussian_mechanism():
    rng = np.random.default_rng(0)
    mu = mu_gaussian(2.0, 1e-5)
    scores = np.concatenate([rng.normal(0, 1, 200_000), rng.normal(mu, 1, 200_000)])
    result = audit_scores(scores, np.repeat([0, 1], 200_000), delta=1e-5, nominal_epsilon=2.0, split_seed=0)
    assert 0.93 * 2 < by_name(result)["gaussian"].epsilon < 2
    assert by_name(result)["gaussian"].epsilon == pytest.approx(result.power.tight_gaussian, rel=0.02)
    assert 0.6 * result.power.tight < result.epsilon_lower_bound < 1.2 * result.power.tight
    assert result.auc == pytest.approx(norm.cdf(mu / math.sqrt(2)), abs=0.003)
    assert result.advantage == pytest.approx(2 * norm.cdf(mu / 2) - 1, abs=0.005)
    assert result.violated is False


def test_the_area_under_the_curve_counts_ties_half_and_scores_that_are_all_alike_show_nothing():
    rng = np.random.default_rng(0)
    members, scores = np.repeat([0, 1], 500), rng.integers(0, 5, 1000) + np.repeat([0, 1], 500)
    assert audit_scores(scores, members, delta=DELTA).auc == pytest.approx(roc_auc_score(members, scores))
    constant = audit_scores(np.zeros(4000), np.arange(4000) % 2, delta=DELTA)
    assert (constant.epsilon_lower_bound, constant.auc, constant.violated) == (0, 0.5, None)


HALF = [0, 1] * 500


@pytest.mark.parametrize(
    "scores, members, options, words",
    [
        ([0.0] * 6, [0, 1] * 3, {}, "too few"),
        ([0.0] * 1000, HALF, {"delta": 0.0}, "delta must lie between"),
        ([0.0] * 999 + [math.nan], HALF, {}, "score 1000 is not a number"),
        ([0.0] * 999, HALF, {}, "do not belong together"),
        ([0.0] * 1000, [0] * 1000, {}, "no games with the example"),
        ([0.0] * 1000, [0, 2] * 500, {}, "members must be 1"),
        ([1j] * 1000, HALF, {}, "must be numbers"),
        ([0.0] * 1000, HALF, {"confidence": 95}, "confidence must lie"),
        ([0.0] * 1000, HALF, {"nominal_epsilon": -1.0}, "claimed epsilon"),
    ],
)
def test_input_that_no_bound_follows_from_is_refused_in_one_line(scores, members, options, words):
    with pytest.raises(InputError, match=words) as refusal:
        audit_scores(scores, members, **{"delta": DELTA, **options})
    assert "\n" not in str(refusal.value)


def test_bounds_need_no_torch():
    program = "import sys, sfumato.auditing.bounds, sfumato.auditing.arguments; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_bounds_hold_where_one_side_always_scores_the_same():
    """Members always score 1, the others mostly: (0, delta)-DP. A split that follows from the scores failed in 27 % of
    such audits: what decides is one number, so that each of its values always met the same split.
    """
    members, count, fails = np.repeat([1, 0], [3033, 15]), 300, 0
    rng = np.random.default_rng(0)
    for _ in range(count):
        scores = np.where(members, 1.0, rng.random(len(members)) < 1 - 0.733832)
        fails += audit_scores(scores, members, delta=0.733832).epsilon_lower_bound > 0
    assert binom.sf(fails - 1, count, 0.05) > 1e-4


@pytest.mark.parametrize("confidence, delta", [(0.55, 0.3), (0.7, 1e-5), (0.999, 0.01)])
def test_so_many_games_as_a_refusal_asks_for_are_enough_at_any_level(confidence, delta):
    with pytest.raises(InputError, match="Play at least") as refusal:
        require_enough(1, 1, confidence, delta)
    count = int(re.search(r"at least ([\d,]+), half", str(refusal.value))[1].replace(",", ""))
    require_enough(count // 2, count // 2, confidence, delta)


def test_scores_are_taken_from_whatever_holds_numbers():
    scores, members = np.random.default_rng(0).normal(size=1000), np.arange(1000) % 2
    truth = audit_scores(scores, members, delta=DELTA, split_seed=1)
    for given, took_part in ((torch.tensor(scores), members == 1), (list(scores), list(members))):
        assert audit_scores(given, took_part, delta=DELTA, split_seed=1) == truth
