"""Rates against the claimed mechanism's own trade-off: the boundary is where it should be."""

import numpy as np
import pytest
from scipy.stats import norm

from sfumato.accounting import accountants
from sfumato.accounting.attacker import true_positive_rates
from sfumato.accounting.mechanism import Mechanism
from sfumato.auditing import bounds

DELTA = 1e-5
WHOLE_BATCH = Mechanism(100, 100, 2.0, 3)  # a Gaussian mechanism, mu = sqrt(3) / 2
SAMPLED = Mechanism(100, 10, 1.5, 20)


@pytest.mark.parametrize("false_positives", [1e-4, 0.3])
def test_without_sampling_the_boundary_is_that_of_the_gaussian_mechanism(false_positives):
    best = norm.sf(norm.isf(false_positives) - np.sqrt(3) / 2)
    assert not bounds.refutes(WHOLE_BATCH, false_positives, best - 1e-3 * (1 - best))
    assert bounds.refutes(WHOLE_BATCH, false_positives, best + 1e-3 * (1 - best))


def test_no_attack_on_the_mechanism_is_refuted_and_one_on_less_noise_is():
    """The best attack on one sampled step, in closed form: a threshold on what is seen."""
    one_step, q = Mechanism(100, 30, 0.7, 1), 0.3
    thresholds = np.linspace(-2, 4, 40)

    def rates(sigma):
        without, drawn = norm.sf(thresholds / sigma), norm.sf((thresholds - 1) / sigma)
        return without, (1 - q) * without + q * drawn

    assert not any(bounds.refutes(one_step, *pair) for pair in zip(*rates(0.7), strict=True))
    assert not any(bounds.refutes(one_step, 1 - true, 1 - false) for false, true in zip(*rates(0.7), strict=True))
    assert any(bounds.refutes(one_step, *pair) for pair in zip(*rates(0.66), strict=True))


@pytest.mark.parametrize("mechanism", [WHOLE_BATCH, SAMPLED])
def test_epsilon_is_above_the_claim_exactly_where_the_claim_is_refuted(mechanism):
    claimed = accountants.epsilon(mechanism, DELTA).epsilon
    found = []
    for true_positives in (0.03, 0.1, 0.3):
        epsilon = bounds.trade_off_epsilon(mechanism, DELTA, 0.02, true_positives)
        assert (epsilon > claimed) == bounds.refutes(mechanism, 0.02, true_positives)
        found.append(epsilon)
    assert found == sorted(found) and found[0] < claimed < found[-1]


def test_epsilon_is_that_of_the_noise_that_the_rates_come_from():
    for sigma in (1.0, 2.0, 5.0):
        mu = np.sqrt(3) / sigma
        truth = accountants.epsilon(WHOLE_BATCH.replace(noise_multiplier=sigma), DELTA).epsilon
        found = bounds.trade_off_epsilon(WHOLE_BATCH, DELTA, norm.sf(mu / 2), norm.sf(-mu / 2))
        assert 0.98 * truth < found <= truth


def test_where_pld_states_no_epsilon_none_is_shown(delta=1e-15):
    """The Renyi accountant's is above the mechanism's own, so that the best attack on a sound one would show more."""
    one_step = Mechanism(4096, 2048, 1.7, 1)
    assert accountants.epsilon(one_step, delta).accountant == "rdp"
    assert bounds.trade_off_epsilon(one_step, delta, 1e-4, 0.5) == -np.inf
    assert bounds.trade_off_epsilon(one_step, delta, 0.3, 0.3) == -np.inf  # whatever the games show
    whole_batch = one_step.replace(batch_size=4096)  # in closed form at every delta
    assert bounds.trade_off_epsilon(whole_batch, delta, 1e-4, 0.5) > 0


@pytest.mark.parametrize(
    "claim, delta, less_noise, false_positives",
    [
        pytest.param(Mechanism(1000, 1, 1.3, 100), 1e-11, 1.05, 0.38, marks=pytest.mark.slow),
        (Mechanism(1000, 1, 0.0, 0), 1e-3, None, 0.1),
    ],
    ids=["pld states nothing of some amounts", "nothing is released"],
)
def test_epsilon_is_above_a_refuted_claim_in_odd_cases_too(claim, delta, less_noise, false_positives):
    truth = claim.replace(noise_multiplier=less_noise) if less_noise else SAMPLED
    true_positives = float(true_positive_rates(truth, [false_positives])[0])
    claimed = accountants.epsilon(claim, delta)
    assert not claimed.note  # far from where a machine's rounding decides whether PLD states an epsilon
    assert bounds.refutes(claim, false_positives, true_positives)
    assert bounds.trade_off_epsilon(claim, delta, false_positives, true_positives) > claimed.epsilon


def test_rates_that_any_noise_allows_show_nothing_and_those_that_no_noise_allows_refute_the_claim():
    """At next to no noise PLD states nothing, but at more it does."""
    assert [bounds.trade_off_epsilon(SAMPLED, DELTA, 0.3, true_positives) for true_positives in (0.2, 0.3)] == [0, 0]
    claimed = Mechanism(1000, 10, 1.0, 1)
    assert bounds.trade_off_epsilon(claimed, DELTA, 1e-3, 0.9) > 100 * accountants.epsilon(claimed, DELTA).epsilon
