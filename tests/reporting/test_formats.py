"""Printed numbers: a bound stays a bound."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sfumato.reporting import formats
from sfumato.reporting.wording import best_guess


@given(st.floats(1e-6, 1e6))
def test_a_printed_epsilon_is_an_upper_bound_within_four_digits(value):
    printed = float(formats.epsilon_text(value))
    assert value <= printed <= value * (1 + 1.0001e-3)


@given(st.integers(1, 9999), st.integers(-5, 3))
def test_an_epsilon_of_four_digits_is_printed_as_it_is(digits, exponent):
    value = float(f"{digits}e{exponent}")
    assert float(formats.epsilon_text(value)) == value


@pytest.mark.parametrize(
    "value, text",
    [(2.99601, "2.997"), (3.0, "3"), (0.0, "0"), (9.9991, "10"), (12345.6, "12350"), (0.000123456, "0.0001235")],
)
def test_epsilons_are_printed_without_exponent(value, text):
    assert formats.epsilon_text(value) == text


@pytest.mark.parametrize("value", [None, math.inf, math.nan])
def test_what_is_no_finite_epsilon_is_infinite(value):
    assert formats.epsilon_text(value) == "infinite"


@given(st.floats(1e-12, 0.999))
def test_delta_is_never_rounded(value):
    assert float(formats.delta_text(value)) == value


@given(st.floats(0, 1))
def test_accuracies_are_per_cent_with_two_decimals(value):
    text = formats.per_cent(value)
    assert text.endswith(" %") and len(text.split(".")[1]) == 4 and abs(float(text[:-2]) / 100 - value) <= 0.5001e-4


@given(st.floats(0, 800), st.floats(1e-9, 0.1))
def test_the_best_guess_lies_between_a_coin_and_certainty_and_its_print_is_no_smaller(epsilon, delta):
    guess = best_guess(epsilon, delta)
    assert 0.5 <= guess <= 1
    assert guess - 1e-12 <= float(formats.per_cent_at_most(guess)[:-2]) / 100 <= guess + 1.001e-4


@given(st.floats(0, 30), st.floats(0, 0.1))
def test_the_best_guess_is_half_of_one_plus_the_advantage(epsilon, delta):
    advantage = (math.exp(epsilon) - 1 + 2 * delta) / (math.exp(epsilon) + 1)
    assert best_guess(epsilon, delta) == pytest.approx((1 + advantage) / 2, abs=1e-12)
