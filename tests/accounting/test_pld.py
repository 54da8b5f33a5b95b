import math

import numpy as np
import pytest
from dp_accounting.pld import common, privacy_loss_distribution, privacy_loss_mechanism

from sfumato.accounting import mixture, pld
from sfumato.accounting.pld import Cost, epsilon_pld
from sfumato.accounting.rdp import epsilon_rdp
from tests.accounting import truth
from tests.accounting.tables import DISTINCT_ROWS


def pld_of(q, sigma, steps, delta):
    return epsilon_pld([(q, sigma, steps)], delta)


def rdp_of(q, sigma, steps, delta):
    return epsilon_rdp([(q, sigma, steps)], delta)


@pytest.mark.parametrize("row", DISTINCT_ROWS[2::5], ids=str)
def test_epsilon_lies_between_exact_and_a_five_hundredth_more_on_the_papers_tables(row):
    exact = truth.epsilon(*row.numbers)
    found = pld_of(*row.numbers).epsilon
    assert exact <= found <= 1.002 * exact
    assert found < rdp_of(*row.numbers)


WIDE = [
    (0.9, 200.0, 1, 1e-5),
    (0.3, 0.3, 1, 1e-6),
    (0.207, 8.08, 720, 1e-8),
    (1e-3, 0.3, 20_000, 1e-5),
    (0.3, 100.0, 2_000_000, 1e-8),
    (0.312, 6.17, 59_899, 1e-6),
    (0.5, 200.0, 200, 1e-5),
]


@pytest.mark.parametrize("numbers", WIDE, ids=str)
def test_epsilon_lies_between_exact_and_two_per_cent_more_over_the_wide_range(numbers):
    q, sigma, steps, delta = numbers
    exact = truth.epsilon_of_one_step(q, sigma, delta) if steps == 1 else truth.epsilon(*numbers)
    found = pld_of(*numbers)
    assert found.reason == ""
    assert exact * (1 - 1e-9) <= found.epsilon <= 1.02 * exact
    assert found.epsilon <= rdp_of(*numbers)


def test_the_truths_agree_with_each_other():
    assert truth.epsilon(1.0, 20.0, 1000, 1e-5) == pytest.approx(
        truth.epsilon_of_gaussian(math.sqrt(1000) / 20, 1e-5), rel=1e-9
    )
    assert truth.epsilon_of_one_step(1.0, 0.7, 1e-5) == pytest.approx(
        truth.epsilon_of_gaussian(1 / 0.7, 1e-5), rel=1e-9
    )


def test_an_answer_that_rises_on_the_finer_grid_is_rejected_as_rounding_noise(monkeypatch):
    honest = pld._epsilon_on_grid
    noisy = Cost.together([(0.08, 3.0, 2468)]).interval * 1.5

    def with_noise(*numbers):
        return honest(*numbers) * (1 if numbers[-1] > noisy else 1.5)

    monkeypatch.setattr(pld, "_epsilon_on_grid", with_noise)
    found = epsilon_pld([(0.08, 3.0, 2468)], 1e-5)
    assert found.epsilon is None and "rounding noise" in found.reason


def test_rounding_noise_is_found_where_it_occurs():
    # A loss of 5e-8 a step: differences of probabilities lose their digits.
    found = pld_of(1e-5, 200.0, 2_000_000, 1e-5)
    assert found.epsilon is None and "rounding noise" in found.reason


def test_a_grid_too_coarse_is_refined_or_else_refused(monkeypatch):
    numbers = (0.08, 3.0, 2468, 1e-5)
    exact = truth.epsilon(*numbers)
    monkeypatch.setattr(pld, "_FIRST_SECONDS", 0.001)
    assert exact <= pld_of(*numbers).epsilon <= 1.01 * exact
    monkeypatch.setattr(pld, "MAX_SECONDS", 0.0)
    found = pld_of(*numbers)
    assert found.epsilon is None and "GB and" in found.reason


@pytest.mark.parametrize("failure", [math.inf, math.nan])
def test_whatever_the_library_says_there_is_a_number_or_a_reason(monkeypatch, failure):
    monkeypatch.setattr(pld, "_epsilon_on_grid", lambda *numbers: failure)
    found = pld_of(0.08, 3.0, 2468, 1e-5)
    assert found.epsilon is None and found.reason.endswith(".")


def test_a_delta_within_the_arithmetics_rounding_error_is_refused():
    found = epsilon_pld([(0.08, 3.0, 2_000_000)], 1e-10)
    assert found.epsilon is None and "rounding error" in found.reason


def test_the_cost_is_known_before_anything_is_computed():
    cost = Cost.together([(0.5, 200.0, 2_000_000)])
    assert cost.bytes(1e-6) > 2e9 and not cost.affordable(1e-6)
    assert cost.affordable(cost.interval)


@pytest.mark.parametrize("numbers", [(0.08192, 3.0, 2468), (1e-3, 2.0, 2_000_000), (1e-3, 0.5, 5000)])
def test_the_estimated_ranges_are_those_that_the_library_keeps(numbers):
    from dp_accounting.pld import privacy_loss_distribution

    q, sigma, steps = numbers
    cost = Cost.together([numbers])
    one_step = privacy_loss_distribution.from_gaussian_mechanism(
        sigma, sampling_prob=q, value_discretization_interval=cost.interval
    )
    composed = pld._compose(one_step, steps)
    assert one_step._pmf_remove.size * cost.interval == pytest.approx(cost.loss_range, rel=0.2)
    assert composed._pmf_remove.size * cost.interval == pytest.approx(cost.composed_range, rel=0.25)


def test_the_estimated_range_is_never_below_what_all_orders_of_the_library_bound(monkeypatch):
    numbers = (0.01, 1.0, 30, 1)
    found, bounds = Cost._of(*numbers).composed_range, common.compute_self_convolve_bounds
    monkeypatch.setattr(common, "compute_self_convolve_bounds", lambda mass, steps, tail, _: bounds(mass, steps, tail))
    assert Cost._of.__wrapped__(Cost, *numbers).composed_range <= found


@pytest.mark.parametrize("steps", [1001, 9_999])
def test_composing_by_blocks_changes_nothing(monkeypatch, steps):
    at_once = epsilon_pld([(0.01, 2.0, steps)], 1e-5).epsilon
    monkeypatch.setattr(pld, "_MAX_STEPS_AT_ONCE", 1000)
    assert epsilon_pld([(0.01, 2.0, steps)], 1e-5).epsilon == pytest.approx(at_once, rel=1e-5)


@pytest.mark.parametrize(
    "q, sigma, images, interval", [(1 / 6, 2.0, 3, 0.05), (0.005, 1.0, 2, 0.02), (0.01, 5.0, 300, 0.2)], ids=str
)
def test_a_step_of_a_person_is_the_library_s_mixture_to_the_last_bit(q, sigma, images, interval, monkeypatch):
    monkeypatch.setattr(mixture, "_BLOCK", 1000)
    probs = np.exp(pld._log_binomial(images, q))
    theirs = privacy_loss_distribution.from_mixture_gaussian_mechanism(
        sigma, range(images + 1), probs, value_discretization_interval=interval
    )
    # What is replaced there: under another name ours would be as slow.
    assert hasattr(privacy_loss_mechanism.MixtureGaussianPrivacyLoss, "_inverse_privacy_losses_with_range")
    ours = mixture.from_mixture(sigma, probs, interval)
    for direction in ("_pmf_remove", "_pmf_add"):
        found, expected = (vars(getattr(each, direction).to_dense_pmf()) for each in (ours, theirs))
        np.testing.assert_equal(found, expected)
        assert len(found["_probs"]) > 50


def test_the_search_for_a_loss_ends_where_floats_lie_further_apart_than_its_precision():
    loss = mixture._Loss(1e6, range(3), [0.25, 0.5, 0.25])
    far = loss._inverse_privacy_losses_with_range(np.array([loss.privacy_loss(3e12)]), (0.0, 1e13))
    assert far == pytest.approx(3e12, rel=1e-3)
