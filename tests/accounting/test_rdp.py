import decimal
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sfumato.accounting.rdp import epsilon_rdp, epsilon_rdp_classic, log_moment, rdp
from tests.accounting import truth
from tests.accounting.tables import DISTINCT_ROWS

ORDERS = 1 + np.geomspace(1e-4, 1e4, 1000)
QS = st.floats(-5, 0).map(lambda x: 10**x)
SIGMAS = st.floats(math.log10(0.3), math.log10(200)).map(lambda x: 10**x)
STEPS = st.floats(0, math.log10(2e6)).map(lambda x: int(10**x))
DELTAS = st.sampled_from([1e-4, 1e-5, 8e-7, 1e-8])


def best_order(q, sigma, steps, delta):
    def epsilon(order):
        return steps * rdp(q, sigma, order) + math.log1p(-1 / order) - math.log(delta * order) / (order - 1)

    near = min(1 + np.geomspace(0.1, 100, 200), key=epsilon)
    return min(1 + (near - 1) * np.geomspace(0.95, 1.05, 100), key=epsilon)


@pytest.mark.parametrize("row", DISTINCT_ROWS, ids=str)
def test_epsilon_is_never_below_high_precision_integration_nor_a_thousandth_above_it_on_the_papers_tables(row):
    exact = truth.epsilon_rdp(*row.numbers, best_order(*row.numbers))
    assert (1 - 1e-6) * exact <= epsilon_rdp(*row.numbers) <= (1 + 1e-6) * exact


@pytest.mark.parametrize("sigma", [0.3, 1.0, 10.0, 200.0])
@pytest.mark.parametrize("q", [1e-5, 1e-3, 0.3, 0.99])
def test_divergence_is_never_below_high_precision_integration_nor_a_thousandth_above_it_over_a_wide_grid(q, sigma):
    for order in (1.01, 2.7, 9.25):
        exact = truth.rdp(q, sigma, order)
        assert exact <= rdp(q, sigma, order) <= (1 + 1e-3) * exact


@pytest.mark.parametrize("sigma", [0.15, 0.2, 0.25, 0.4, 1.0])
@pytest.mark.parametrize("q", [1e-19, 1e-18, 1e-17, 1e-16, 1e-14, 1e-10])
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


def test_divergence_of_huge_sigma_tends_to_the_second_order_term():
    assert rdp(1e-5, 200.0, 2.0) == pytest.approx(
        math.log1p(1e-10 * math.expm1(1 / 200**2)), rel=1e-6
    )  # exact at order 2
    assert rdp(1e-3, 2.0, 2.0) == pytest.approx(math.log1p(1e-6 * math.expm1(1 / 4)), rel=1e-6)


@pytest.mark.parametrize(
    "numbers", [(0.08, 3.0, 2468, 1e-5), (1e-3, 0.5, 100, 1e-6), (0.5, 200.0, 5000, 1e-5), (1e-4, 1.0, 10**6, 1e-8)]
)
def test_no_order_gives_less_than_the_order_that_is_chosen(numbers):
    q, sigma, steps, delta = numbers
    found = epsilon_rdp(*numbers)
    for order in ORDERS[::10]:
        other = steps * rdp(q, sigma, order) + math.log1p(-1 / order) - math.log(delta * order) / (order - 1)
        assert found <= other * (1 + 1e-9)


def test_real_orders_beat_the_integers_where_they_are_coarse():
    q, sigma, steps, delta = 0.05, 0.6, 5000, 1e-5  # the best order lies near 1.2
    integers = min(steps * rdp(q, sigma, a) + math.log1p(-1 / a) - math.log(delta * a) / (a - 1) for a in range(2, 64))
    assert epsilon_rdp(q, sigma, steps, delta) < 0.8 * integers


@pytest.mark.parametrize(
    ("table", "nominal", "low", "high"),
    [(12, 1.0, 0.9875, 0.9885), (12, 8.0, 7.04, 7.05), (13, 6.0, 5.995, 5.9965), (14, 8.0, 7.999, 8.001)],
)
def test_known_values_of_the_papers_tables(table, nominal, low, high):
    (row,) = [row for row in DISTINCT_ROWS if row.table == table and row.nominal_epsilon == nominal]
    assert low < epsilon_rdp(*row.numbers) < high


def test_the_classic_conversion_is_looser():
    for row in DISTINCT_ROWS[:6]:
        assert 1.05 * epsilon_rdp(*row.numbers) < epsilon_rdp_classic(*row.numbers) < 1.3 * epsilon_rdp(*row.numbers)


@settings(max_examples=25, deadline=None)
@given(QS, SIGMAS, STEPS, DELTAS)
def test_epsilon_is_monotone(q, sigma, steps, delta):
    here = epsilon_rdp(q, sigma, steps, delta)
    assert math.isfinite(here) and here >= 0
    slack = 1e-7 * here + 1e-12  # the search for the order stops there
    assert epsilon_rdp(q, sigma * 1.01, steps, delta) <= here + slack
    assert epsilon_rdp(q * 0.99, sigma, steps, delta) <= here + slack
    assert epsilon_rdp(q, sigma, steps + 1, delta) >= here - slack
    assert epsilon_rdp(q, sigma, steps, delta * 1.1) <= here + slack


@settings(max_examples=25, deadline=None)
@given(SIGMAS, STEPS, DELTAS)
def test_epsilon_without_sampling_lies_just_above_the_analytic_gaussian(sigma, steps, delta):
    exact = truth.epsilon_of_gaussian(math.sqrt(steps) / sigma, delta)
    found = epsilon_rdp(1.0, sigma, steps, delta)
    assert exact <= found <= 1.35 * exact + 0.05
