import decimal
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sfumato.accounting.rdp import epsilon_rdp, log_moment, rdp
from tests.accounting import truth
from tests.accounting.tables import DISTINCT_ROWS

QS = st.floats(-5, 0).map(lambda x: 10**x)
SIGMAS = st.floats(math.log10(0.3), math.log10(200)).map(lambda x: 10**x)
STEPS = st.floats(0, math.log10(2e6)).map(lambda x: int(10**x))
DELTAS = st.sampled_from([1e-4, 1e-5, 8e-7, 1e-8])


def rdp_of(q, sigma, steps, delta):
    return epsilon_rdp([(q, sigma, steps)], delta)


def best_order(q, sigma, steps, delta):
    def epsilon(order):
        return steps * rdp(q, sigma, order) + math.log1p(-1 / order) - math.log(delta * order) / (order - 1)

    near = min(1 + np.geomspace(0.1, 100, 200), key=epsilon)
    return min(1 + (near - 1) * np.geomspace(0.95, 1.05, 100), key=epsilon)


@pytest.mark.parametrize("row", DISTINCT_ROWS[::5], ids=str)
def test_epsilon_is_never_below_high_precision_integration_nor_a_thousandth_above_it_on_the_papers_tables(row):
    exact = truth.epsilon_rdp(*row.numbers, best_order(*row.numbers))
    assert (1 - 1e-6) * exact <= rdp_of(*row.numbers) <= (1 + 1e-6) * exact


@pytest.mark.parametrize(
    ("q", "sigma"), [(1e-5, 0.3), (1e-5, 200.0), (1e-3, 1.0), (0.3, 0.3), (0.3, 10.0), (0.99, 200.0)]
)
def test_divergence_is_never_below_high_precision_integration_nor_a_thousandth_above_it_over_a_wide_grid(q, sigma):
    for order in (1.01, 2.7, 9.25):
        exact = truth.rdp(q, sigma, order)
        assert exact <= rdp(q, sigma, order) <= (1 + 1e-3) * exact


@pytest.mark.parametrize(("q", "sigma"), [(1e-19, 0.15), (1e-17, 0.25), (1e-16, 0.15), (1e-14, 1.0), (1e-10, 0.25)])
def test_a_moment_is_never_below_its_binomial_sum_however_small_q_is(q, sigma):
    """Where sigma is small, all of it comes from far out."""
    with decimal.localcontext(decimal.Context(prec=120)):
        p, s = decimal.Decimal(q), decimal.Decimal(sigma)
        for order in (2, 3, 5, 16):
            terms = (
                math.comb(order, k) * (1 - p) ** (order - k) * p**k * (decimal.Decimal(k * (k - 1)) / (2 * s * s)).exp()
                for k in range(order + 1)
            )
            exact = float(sum(terms).ln())
            assert exact <= log_moment(q, sigma, order) <= exact * (1 + 2.1e-7)


def test_divergence_without_sampling_meets_its_closed_form():
    for sigma in (0.3, 2.0, 200.0):
        for order in (1.001, 3.3, 500.0):
            assert rdp(1.0, sigma, order) == pytest.approx(order / (2 * sigma**2), rel=1e-12)
            assert rdp(1 - 1e-12, sigma, order) == pytest.approx(order / (2 * sigma**2), rel=1e-6)


def test_real_orders_beat_the_integers_where_they_are_coarse():
    q, sigma, steps, delta = 0.05, 0.6, 5000, 1e-5  # the best order lies near 1.2
    integers = min(steps * rdp(q, sigma, a) + math.log1p(-1 / a) - math.log(delta * a) / (a - 1) for a in range(2, 64))
    assert rdp_of(q, sigma, steps, delta) < 0.8 * integers


@settings(max_examples=25, deadline=None)
@given(QS, SIGMAS, STEPS, DELTAS)
def test_epsilon_is_monotone(q, sigma, steps, delta):
    here = rdp_of(q, sigma, steps, delta)
    assert math.isfinite(here) and here >= 0
    slack = 1e-7 * here + 1e-12  # the search for the order stops there
    assert rdp_of(q, sigma * 1.01, steps, delta) <= here + slack
    assert rdp_of(q * 0.99, sigma, steps, delta) <= here + slack
    assert rdp_of(q, sigma, steps + 1, delta) >= here - slack
    assert rdp_of(q, sigma, steps, delta * 1.1) <= here + slack


@settings(max_examples=25, deadline=None)
@given(SIGMAS, STEPS, DELTAS)
def test_epsilon_without_sampling_lies_just_above_the_analytic_gaussian(sigma, steps, delta):
    exact = truth.epsilon_of_gaussian(math.sqrt(steps) / sigma, delta)
    found = rdp_of(1.0, sigma, steps, delta)
    assert exact <= found <= 1.35 * exact + 0.05
