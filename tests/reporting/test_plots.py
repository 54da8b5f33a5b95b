"""The curves: true to their numbers, at home in any page, and no trace in the caller's matplotlib."""

import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from sfumato.reporting.plots import FIRST, INK, SECOND, training_curves
from sfumato.run_folder.record import Metrics
from tests.reporting import folders


def draw(lines=10, *, with_epsilon=True, metrics=None, **options) -> ElementTree.Element:
    metrics = folders.curve(lines) if metrics is None else metrics
    return ElementTree.fromstring(training_curves(recorded(metrics), with_epsilon=with_epsilon, **options))


def recorded(metrics):
    return [Metrics(**line) for line in metrics]


def polylines(svg: ElementTree.Element, colour: str) -> list[list[tuple[float, float]]]:
    """The vertices of every curve of one colour that has no dashes."""
    curves = []
    for path in svg.iter("path"):
        style = path.get("style", "")
        if path.get("clip-path") and f"stroke: var(--{colour})" in style and "dasharray" not in style:
            curves.append([(float(x), float(y)) for x, y in re.findall(r"[ML] ([-\d.]+) ([-\d.]+)", path.get("d", ""))])
    return curves


def texts(svg: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in svg.iter("text")]


def affine(values: list[float], positions: list[float]) -> list[float]:
    """Positions that lie on the line through the first and the last pair, as an axis must place them."""
    slope = (positions[-1] - positions[0]) / (values[-1] - values[0])
    return [positions[0] + slope * (value - values[0]) for value in values]


def test_the_drawn_curves_are_the_recorded_numbers_on_linear_axes():
    metrics = folders.curve(10)
    svg = draw(metrics=metrics)
    averaged, epsilon = polylines(svg, "first")
    (last,) = polylines(svg, "second")
    for curve, key in ((averaged, "accuracy"), (last, "accuracy_last"), (epsilon, "epsilon")):
        assert [x for x, _ in curve] == pytest.approx(
            affine([line["step"] for line in metrics], [x for x, _ in curve]), abs=1e-3
        )
        assert [y for _, y in curve] == pytest.approx(
            affine([line[key] for line in metrics], [y for _, y in curve]), abs=1e-3
        )
        assert curve[0][1] > curve[-1][1]  # they rise: SVG counts downwards


def test_the_two_accuracies_share_one_scale():
    metrics = [
        {"step": s, "epsilon": None, "accuracy": a, "accuracy_last": b} for s, a, b in ((1, 0.2, 0.6), (2, 0.6, 0.2))
    ]
    svg = draw(metrics=metrics, with_epsilon=False)
    (first,), (second,) = polylines(svg, "first"), polylines(svg, "second")
    assert [y for _, y in first] == [y for _, y in second[::-1]]


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
    svg = draw(metrics=metrics, majority_rate=value)
    assert not {text for text in texts(svg) if text.startswith("−") or text.endswith(" %") and float(text[:-2]) > 100}


@pytest.mark.parametrize("lines", [1, 2, 50, 51, 5000])
def test_any_number_of_lines_can_be_drawn(lines):
    svg = draw(lines, majority_rate=0.1, target=3.0)
    assert svg.find("title") is not None and "96" in svg.find("desc").text or lines < 5
    markers = [use for use in svg.iter("use") if "--first" in use.get("style", "")]
    assert bool(markers) == (lines <= 50)


def test_the_figure_takes_colours_and_font_from_the_page():
    text = training_curves(recorded(folders.curve(5)), with_epsilon=True, majority_rate=0.1, target=3.0)
    assert not re.search(r"#[0-9a-f]{6}\b(?![0-9a-f])", text) and "rgb" not in text
    assert "font-family" not in text and "<style" not in text and "xlink" not in text and "xmlns" not in text
    assert {"var(--first)", "var(--second)", "var(--muted)", "var(--line)"} == set(re.findall(r"var\([^)]*\)", text))
    assert len({INK, FIRST, SECOND}) == 3


def test_text_stays_text():
    words = texts(draw(majority_rate=0.1, target=3.0))
    for word in (
        "step",
        "Held-out accuracy",
        "Epsilon spent so far",
        "averaged weights",
        "last weights",
        "asked for: 3",
    ):
        assert word in words


def test_the_description_says_where_the_curves_begin_and_end():
    text = draw().find("desc").text
    assert text == "Held-out accuracy is 66.39 % at step 6 and 96.33 % at step 60. Epsilon has then reached 2.997."


def test_the_callers_matplotlib_is_left_as_it_was():
    import matplotlib

    with matplotlib.rc_context(
        {"font.size": 31.0, "svg.fonttype": "path", "axes.facecolor": "red", "text.usetex": False}
    ):
        before = dict(matplotlib.rcParams)
        bold = training_curves(recorded(folders.curve(5)), with_epsilon=True)
        assert dict(matplotlib.rcParams) == before
    assert training_curves(recorded(folders.curve(5)), with_epsilon=True) == bold


def test_drawing_neither_chooses_a_backend_nor_opens_pyplot_and_the_modules_import_neither_torch_nor_matplotlib():
    program = """
import sys
import sfumato.reporting.page
heavy = {"torch", "matplotlib", "scipy", "sklearn", "dp_accounting", "PIL"} & set(sys.modules)
assert not heavy, heavy
others = tuple(f"sfumato.{part}" for part in ("training", "clipping", "models", "data"))
assert not [name for name in sys.modules if name.startswith(others)]
import matplotlib
backend = matplotlib.rcParams._get_backend_or_none()
from sfumato.reporting.plots import training_curves
from sfumato.run_folder.record import Metrics
training_curves([Metrics(step=1, epsilon=1.0, accuracy=0.5, accuracy_last=0.5)], with_epsilon=True)
assert "matplotlib.pyplot" not in sys.modules and "torch" not in sys.modules
assert matplotlib.rcParams._get_backend_or_none() == backend
"""
    subprocess.run([sys.executable, "-c", program], check=True)
