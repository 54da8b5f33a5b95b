"""The canary audit runs the product's own step: it accuses no sound one, and it sees what is broken."""

import math

import numpy as np
import pytest
from scipy.stats import binom, norm

from sfumato.accounting import accountants
from sfumato.accounting.mechanism import Mechanism
from sfumato.auditing import canary
from sfumato.auditing.arguments import calibrated
from sfumato.auditing.bounds import audit_scores
from sfumato.data.sampling import poisson_batch
from sfumato.errors import InputError
from sfumato.training import step as step_module
from sfumato.training.noise import with_noise

DELTA = 1e-5
SHORT = Mechanism(200, 100, 1.0, 4)


def claimed(epsilon):
    """The mechanism that a run of that epsilon has, at q = 1/2."""
    return calibrated(4000, 2000, 4, epsilon, DELTA)


def audited(mechanism, num_runs):
    """What an audit says of the step as it is now, of which ``mechanism`` is claimed."""
    return judged(mechanism, *canary.play(mechanism, num_runs))


def judged(mechanism, scores, members):
    nominal = accountants.epsilon(mechanism, DELTA).epsilon
    return audit_scores(scores, members, delta=DELTA, nominal_epsilon=nominal, mechanism=mechanism)


def test_a_canary_that_takes_part_shows_where_it_is_drawn_and_one_that_does_not_never():
    """With next to no noise: 1 in a share q of the updates, 0 in all others, whatever the others do."""
    mechanism = SHORT.replace(noise_multiplier=1e-3, num_steps=50)
    took_part = np.arange(200) < 120
    seen = canary.observe(mechanism, took_part)
    assert np.all(np.minimum(abs(seen), abs(seen - 1)) < 0.01)
    drawn = seen.round().astype(int)
    assert drawn[:, ~took_part].sum() == 0
    count = drawn[:, took_part].sum()
    assert 1e-5 < binom.cdf(count, 50 * 120, 0.5) < 1 - 1e-5
    assert abs(np.corrcoef(drawn[:, 0], drawn[:, 1])[0, 1]) < 0.7  # each by itself


def test_what_is_seen_has_the_noise_of_the_mechanism():
    seen = canary.observe(SHORT.replace(num_steps=20), np.zeros(200, dtype=bool))
    assert seen.std() == pytest.approx(1.0, abs=5 / math.sqrt(2 * seen.size))
    assert abs(seen.mean()) < 5 / math.sqrt(seen.size)


def test_the_score_is_the_logarithm_of_the_ratio_of_both_densities():
    mechanism = SHORT.replace(noise_multiplier=0.8)
    seen = np.random.default_rng(0).normal(size=(4, 7))
    without, with_it = norm.pdf(seen, 0, 0.8), 0.5 * norm.pdf(seen, 0, 0.8) + 0.5 * norm.pdf(seen, 1, 0.8)
    np.testing.assert_allclose(canary.log_likelihood_ratio(seen, mechanism), np.log(with_it / without).sum(0))
    always = mechanism.replace(batch_size=200)
    expected = np.log(norm.pdf(seen, 1, 0.8) / without).sum(0)
    np.testing.assert_allclose(canary.log_likelihood_ratio(seen, always), expected)


def test_a_sound_step_is_not_accused_and_shows_most_of_its_epsilon():
    settings = {"num_steps": 4, "sampling_prob": 0.5, "num_games": 8000, "confidence": 0.99}
    result = canary.audit_canary(epsilon=8.0, delta=DELTA, **settings)
    bounds = {bound.name: bound.epsilon for bound in result.bounds}
    assert result.violated is False
    # In 704 audits: 2.3, from 1.3 to 3.4; and 6.6, from 5.1 to 7.8, but 4.3 once.
    assert result.epsilon_lower_bound == bounds["clopper-pearson"] > 0.5
    assert 0.4 * 8 < bounds["trade-off"] < 8
    assert 7.95 < result.nominal_epsilon <= 8 == result.target_epsilon
    assert result.num_games == result.num_runs * result.games_per_run >= 8000
    assert result.sampling_prob == 0.5 and 0 < result.advantage < result.advantage_upper_bound


def test_noise_over_root_two_is_caught(monkeypatch):
    monkeypatch.setattr(step_module, "with_noise", lambda total, stddev, *own: with_noise(total, stddev / 2**0.5, *own))
    assert audited(claimed(8.0), 2).violated


def test_a_sampler_that_draws_too_often_is_caught(monkeypatch):
    def always(mechanism, stream):
        return poisson_batch(mechanism.replace(batch_size=mechanism.num_examples), stream)

    monkeypatch.setattr(step_module, "poisson_batch", always)
    assert audited(claimed(4.0), 3).violated


def test_noise_that_is_the_same_in_two_updates_is_caught(monkeypatch):
    """The attacker's best score takes updates for independent; another one, made for the fault, is better."""
    kept = {}

    def again(total, *given):
        return total + kept.setdefault("noise", with_noise(total, *given) - total)

    monkeypatch.setattr(step_module, "with_noise", again)
    mechanism = claimed(2.0)
    took_part = canary.coins(mechanism.num_examples)
    seen = canary.observe(mechanism, took_part)
    assert judged(mechanism, seen.max(0) - seen.min(0), took_part).violated


def test_two_runs_share_neither_coins_nor_noise():
    mechanism = SHORT.replace(num_steps=2)
    nobody = np.zeros(200, dtype=bool)
    one, other = canary.observe(mechanism, nobody), canary.observe(mechanism, nobody)
    assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 5 / math.sqrt(400)
    first, second = canary.coins(1000), canary.coins(1000)
    assert abs(first.mean() - 0.5) < 0.1 and abs((first == second).mean() - 0.5) < 0.1


@pytest.mark.slow
def test_forty_sound_audits_are_accused_no_more_often_than_stated():
    accused = sum(bool(audited(claimed(epsilon), 2).violated) for epsilon in (1.0, 2.0, 4.0, 8.0) for _ in range(10))
    assert binom.sf(accused - 1, 40, 0.05) > 1e-3


@pytest.mark.parametrize(
    "change, words",
    [
        ({"sampling_prob": math.nan}, "sampling_prob must lie"),
        ({"sampling_prob": 1e-5}, "denominator"),
        ({"num_games": 4}, "too few"),
        ({"num_games": 0}, "num_games must be"),
        ({"epsilon": 1e-17}, "epsilon must be a number from 1e-09"),
        ({"num_steps": 10**8}, "do not fit into memory"),
        ({"delta": 0.0}, "delta must lie"),
    ],
)
def test_settings_that_no_audit_has_are_refused_in_one_line(change, words):
    settings = {"epsilon": 1.0, "delta": DELTA, "num_games": 1000, **change}
    with pytest.raises(InputError, match=words) as refusal:
        canary.audit_canary(**settings)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("sampling_prob, num_games", [(1.0, 4096), (1 / 3, 5000), (409 / 4096, 200_000)])
def test_a_run_has_a_whole_number_of_expected_canaries(sampling_prob, num_games):
    num_canaries, num_runs = canary._games(sampling_prob, num_games)
    assert num_canaries <= canary.SIDE**2 and num_canaries * num_runs >= num_games
    assert round(sampling_prob * num_canaries) == pytest.approx(sampling_prob * num_canaries, abs=1e-6)
