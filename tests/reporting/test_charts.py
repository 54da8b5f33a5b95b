"""The curves: true to their numbers, and at home in any page."""

import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from sfumato.reporting import html
from sfumato.reporting.charts import WIDTHS, Axis, Chart, Curve, Panel, chart, linear, logarithmic, spanning
from sfumato.reporting.page import training_curves
from sfumato.run_folder.record import Metrics
from tests.reporting import folders


def written(chart: Chart) -> str:
    return html.PAGES.from_string('{% import "parts.html" as parts %}{{ parts.figure(chart, "") }}').render(chart=chart)


def svg_of(chart: Chart, width: str = "wide") -> ElementTree.Element:
    figure = ElementTree.fromstring(written(chart))
    return next(svg for svg in figure.iter("svg") if svg.get("class") == width)


def draw(lines=10, *, with_epsilon=True, metrics=None, width="wide", **options) -> ElementTree.Element:
    metrics = folders.curve(lines) if metrics is None else metrics
    chart = training_curves([Metrics(**line) for line in metrics], with_epsilon=with_epsilon, **options)
    return svg_of(chart, width)


def polylines(svg: ElementTree.Element, colour: str) -> list[np.ndarray]:
    """The vertices, (n, 2), of every curve of one colour that has no dashes."""
    return [
        np.array([[float(number) for number in pair.split(",")] for pair in line.get("points").split()])
        for line in svg.iter("polyline")
        if line.get("class") == "curve"
        and f"stroke: var(--{colour})" in line.get("style")
        and "dasharray" not in line.get("style")
    ]


def assert_affine(places, values) -> None:
    """As an axis must place them, upwards."""
    slope, start = np.polyfit(values, places, 1)
    np.testing.assert_allclose(places, slope * np.array(values) + start, atol=0.02)
    assert slope > 0


@pytest.mark.parametrize("width", WIDTHS)
def test_the_drawn_curves_are_the_recorded_numbers_on_linear_axes(width):
    metrics = folders.curve(10)
    svg = draw(metrics=metrics, width=width)
    averaged, epsilon = polylines(svg, "first")
    (last,) = polylines(svg, "second")
    for curve, key in ((averaged, "accuracy"), (last, "accuracy_last"), (epsilon, "epsilon")):
        assert_affine(curve[:, 0], [line["step"] for line in metrics])
        assert_affine(-curve[:, 1], [line[key] for line in metrics])  # SVG counts downwards


def test_ticks_stand_where_their_values_are_drawn():
    x, y = linear(0, 10, 5, "{:g}".format), logarithmic(1e-3, "{:g}".format)
    for axis in (x, y):
        assert [float(text) for _, text in axis.ticks] == [value for value, _ in axis.ticks]
    values = [value for value, _ in y.ticks]
    curve = Curve("a", [2, 4, 6, 8], values, "first")
    svg = svg_of(chart(x, [Panel("t", [curve], y, 90)], "t", "d"))
    (drawn,) = polylines(svg, "first")
    heights = {text.text: float(text.get("y")) - 4 for text in svg.iter("text") if text.get("text-anchor") == "end"}
    across = {text.text: float(text.get("x")) for text in svg.iter("text") if text.get("text-anchor") == "middle"}
    np.testing.assert_allclose(drawn[:, 1], [heights[f"{value:g}"] for value in values], atol=0.02)
    np.testing.assert_allclose(drawn[:, 0], [across[text] for text in ("2", "4", "6", "8")], atol=0.02)


@pytest.mark.parametrize(
    "low, high, most, whole, ticks",
    [(0, 10, 5, False, [0, 2, 4, 6, 8, 10]), (0, 1.02, 8, True, [0, 1]), (-0.03, 0.06, 4, False, [0, 0.05])],
)
def test_ticks_are_round_and_few(low, high, most, whole, ticks):
    found = [value for value, _ in linear(low, high, most, str, whole=whole).ticks]
    assert found == pytest.approx(ticks) and len(found) <= most + 1


@pytest.mark.parametrize("width", WIDTHS)
def test_no_text_stands_in_another_s_place_or_beyond_the_drawing(width):
    x = Axis(0, 100, [(value, f"value {value}") for value in range(100)])
    long = Curve(
        "a name that is longer than a phone is wide, and longer than most screens are, too" * 2, [0], [0], "first"
    )
    svg = svg_of(chart(x, [Panel("t", [long], Axis(0, 1, []), 50)], "t", "d"), width)
    places = [float(text.get("x")) for text in svg.iter("text") if text.get("text-anchor") == "middle"]
    assert 2 < len(places) < 12 and np.diff(places).min() > 6.8 * len("value 10")
    for text in svg.iter("text"):
        if text.get("text-anchor") == "start":
            assert float(text.get("x")) + 6.8 * len(text.text) <= WIDTHS[width]


def test_axes_are_logarithmic_only_where_values_span_much():
    assert not spanning([1.0, 7.0], str, "").is_log and spanning([1.0, 8.0], str, "").is_log
    ticks = [value for value, _ in spanning([0.5, 1000.0], str, "").ticks]
    assert ticks == pytest.approx([0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000])
    for values in ([3.0], [0.0, 0.0], [2.0, 2.5]):
        axis = spanning(values, str, "")
        assert axis.low < min(values) <= max(values) < axis.high


def test_what_lies_beyond_an_axis_is_drawn_at_its_end():
    assert Axis(1, 3, []).shares([0, 2, 9]).tolist() == [0, 0.5, 1]
    assert logarithmic(0.01, str).shares([0.0, 0.1, 1.0]).tolist() == pytest.approx([0, 0.5, 1])


def test_the_steps_of_a_histogram_are_as_wide_as_its_bins():
    curve = Curve("a", [0.0, 1.0, 3.0], [5.0, 2.0], "first", steps=True)
    x, y = Axis(0, 3, []), Axis(0, 5, [])
    svg = svg_of(chart(x, [Panel("t", [curve], y, 50)], "t", "d"))
    (drawn,) = polylines(svg, "first")
    assert np.diff(drawn[:, 0])[[0, 2]] @ [2, -1] == pytest.approx(0, abs=0.05)
    assert drawn[0, 1] == drawn[1, 1] != drawn[2, 1] == drawn[3, 1]


def test_the_two_accuracies_share_one_scale():
    metrics = [
        {"step": s, "epsilon": None, "accuracy": a, "accuracy_last": b} for s, a, b in ((1, 0.2, 0.6), (2, 0.6, 0.2))
    ]
    svg = draw(metrics=metrics, with_epsilon=False)
    (first,), (second,) = polylines(svg, "first"), polylines(svg, "second")
    assert first[:, 1].tolist() == second[::-1, 1].tolist()


def test_epsilon_is_drawn_only_where_it_is_a_guarantee():
    assert len(polylines(draw(with_epsilon=True), "first")) == 2
    svg = draw(with_epsilon=False, target=3.0)
    assert len(polylines(svg, "first")) == 1
    words = " ".join(svg.itertext())
    assert "psilon" not in words and "asked for" not in words


def test_lines_without_an_epsilon_are_passed_over():
    metrics = [{**line, "epsilon": None if i < 3 else line["epsilon"]} for i, line in enumerate(folders.curve(6))]
    averaged, epsilon = polylines(draw(metrics=metrics), "first")
    assert (len(averaged), len(epsilon)) == (6, 3)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_flat_curves_at_the_ends_of_the_scale_are_drawn_within_it(value):
    metrics = [{"step": s, "epsilon": 0.0, "accuracy": value, "accuracy_last": value} for s in (1, 2, 3)]
    shown = [text.text for text in draw(metrics=metrics, majority_rate=value).iter("text")]
    assert not [text for text in shown if text.endswith(" %") and not 0 <= float(text[:-2]) <= 100]


@pytest.mark.parametrize("lines", [1, 51])
def test_any_number_of_lines_can_be_drawn(lines):
    svg = draw(lines, majority_rate=0.1, target=3.0)
    assert svg.find("title") is not None and bool(list(svg.iter("circle"))) == (lines <= 50)


def test_the_chart_takes_colours_and_font_from_the_page_and_its_text_stays_text():
    metrics = [Metrics(**line) for line in folders.curve(5)]
    text, again = (written(training_curves(metrics, with_epsilon=True, majority_rate=0.1, target=3.0)) for _ in "ab")
    assert text == again
    assert not re.search(r"#[0-9a-f]{6}|rgb|font-family|<style|xmlns", text)
    assert {"var(--first)", "var(--second)", "var(--muted)", "var(--line)"} == set(re.findall(r"var\([^)]*\)", text))
    words = "step", "Held-out accuracy", "Epsilon spent so far", "averaged weights", "last weights", "asked for: 3"
    assert set(words) <= {each.text for each in ElementTree.fromstring(text).iter("text")}


def test_the_description_says_where_the_curves_begin_and_end():
    text = draw().find("desc").text
    assert text == "Held-out accuracy is 66.39 % at step 6 and 96.33 % at step 60. Epsilon has then reached 2.997."


def test_a_report_needs_neither_torch_nor_matplotlib():
    program = """
import sys
from sfumato.reporting.page import training_curves
from sfumato.run_folder.record import Metrics
training_curves([Metrics(step=1, epsilon=1.0, accuracy=0.5, accuracy_last=0.5)], with_epsilon=True)
heavy = {"torch", "matplotlib", "scipy", "sklearn", "dp_accounting", "PIL"} & set(sys.modules)
assert not heavy, heavy
others = tuple(f"sfumato.{part}" for part in ("training", "clipping", "models", "data"))
assert not [name for name in sys.modules if name.startswith(others)]
"""
    subprocess.run([sys.executable, "-c", program], check=True)
