"""Printed numbers: a bound stays a bound. And no value can become markup, wherever it stands."""

import decimal
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sfumato.accounting import formats
from sfumato.accounting.formats import lower_epsilon_text
from sfumato.reporting import html

ROUNDINGS = [decimal.ROUND_FLOOR, decimal.ROUND_CEILING, decimal.ROUND_HALF_EVEN, decimal.ROUND_DOWN]


@given(st.floats(1e-6, 1e6))
def test_a_printed_epsilon_is_an_upper_bound_within_four_digits(value):
    printed = float(formats.epsilon_text(value))
    assert value <= printed <= value * (1 + 1.0001e-3)


@given(st.integers(1, 9999), st.integers(-5, 3))
def test_an_epsilon_of_four_digits_is_printed_as_it_is(digits, exponent):
    value = float(f"{digits}e{exponent}")
    assert float(formats.epsilon_text(value)) == value


def test_epsilons_are_printed_without_exponent_and_what_is_none_as_infinite():
    for value, text in {0.0: "0", 9.9991: "10", 12345.6: "12350", 0.000123456: "0.0001235"}.items():
        assert formats.epsilon_text(value) == text
    assert {formats.epsilon_text(value) for value in (None, math.inf, math.nan)} == {"infinite"}


@given(st.floats(1e-9, 0.999), st.integers(1, 6), st.sampled_from(ROUNDINGS))
def test_no_setting_of_the_program_moves_a_bound(value, digits, rounding):
    """`decimal.getcontext` is the user's own."""
    printed = [formats.epsilon_text, lower_epsilon_text, formats.delta_text, formats.chance_at_most]
    before = [text(value) for text in printed]
    with decimal.localcontext(decimal.Context(prec=digits, rounding=rounding, Emin=-2, Emax=2)):
        assert [text(value) for text in printed] == before


@given(st.floats(1e-12, 0.999))
def test_delta_is_never_rounded(value):
    assert float(formats.delta_text(value)) == value


@given(st.floats(0, 1))
def test_accuracies_are_per_cent_with_two_decimals(value):
    text = formats.per_cent(value)
    assert text.endswith(" %") and len(text.split(".")[1]) == 4 and abs(float(text[:-2]) / 100 - value) <= 0.5001e-4


@given(st.floats(0, 1))
def test_a_bound_s_print_is_no_smaller(value):
    assert value - 1e-12 <= float(formats.per_cent_at_most(value)[:-2]) / 100 <= value + 1.001e-4


def written(template, **facts):
    return html.PAGES.from_string(template).render(facts)


# An HTML parser turns NUL and carriage returns into something else.
TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"])) | st.sampled_from(
    ['"><script>', "' onload='x", "&amp;", "</p>", "<!--", "]]>"]
)


@given(TEXT, TEXT)
def test_a_parser_reads_back_the_very_text_and_attribute_and_no_other_element(content, value):
    seen = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag, attrs):
            seen.append((tag, attrs))

        def handle_data(self, data):
            seen.append(data)

    reader = Reader()
    reader.feed(written('<p title="{{ value }}">{{ content }}</p>', content=content, value=value))
    reader.close()
    assert seen[0] == ("p", [("title", value)])
    assert "".join(seen[1:]) == content


def test_markup_is_not_escaped_twice():
    parts = '{% import "parts.html" as parts %}{{ parts.points(["&"]) }}'
    assert "<li>&amp;</li>" in written(parts)


def test_a_control_character_is_spelled_out():
    assert written("<p>{{ a }}</p>", a="a\x1b[31mb\tc\n") == "<p>a\\x1b[31mb\tc\n</p>"


def test_a_fact_that_is_missing_raises():
    with pytest.raises(jinja2.UndefinedError):
        written("{{ nothing }}")


def test_templates_are_small_and_leave_the_rounding_of_bounds_to_the_formats():
    """An epsilon that a template rounds itself would be rounded to nearest. Widths and confidences are no bounds."""
    texts = [path.read_text() for path in Path(html.__file__).with_name("templates").iterdir()]
    lines = [line for text in texts for line in text.splitlines()]
    assert len(lines) <= 900 and max(map(len, lines)) <= 120
    rounding = [line for line in lines if re.search(r"\| *(round|format|float|int)\b|\.format\(|%\.\d", line)]
    assert not [line for line in rounding if not re.search(r"(width|left): \{\{ .*%|found\.confidence", line)]


def test_progress_tells_how_much_of_how_much_how_fast_and_how_long_still():
    assert formats.progress("runs", 0, 10, 0.0) == "runs: 0 of 10, 0.0 a second, 0:00 left"
    assert formats.progress("runs", 1, 4, 90.0) == "runs: 1 of 4, 0.0 a second, 4:30 left"
    assert formats.progress("runs", 5, 1_000_000, 1.0) == "runs: 5 of 1,000,000, 5.0 a second, 3333:19 left"
