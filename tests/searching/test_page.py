"""The page of a search: its trials, what was chosen, and what no epsilon covers."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from sfumato.searching.page import render
from tests.reporting.made_up import search
from tests.reporting.test_page import Page


def test_each_trial_stands_with_its_settings_and_score_and_the_one_that_was_kept_is_marked():
    text = Page(render(search())).text
    for row in (
        "learning rate optimizer.learning_rate = 1.0 89.11 %",
        "learning rate optimizer.learning_rate = 4.0 92.13 % kept",
        "learning rate optimizer.learning_rate = 8.0 given up",
        "averaging ema.decay = 0.9 92.23 % averaging",  # the best of its stage, by chance: not kept
    ):
        assert row in text
    assert "learning rate 3 1 +2.13 +0.81 kept" in text and "averaging 2 0 +0.10 +0.81 not a gain" in text


def test_scores_are_drawn_one_after_the_other():
    drawing = re.search(r"<svg.*?</svg>", render(search()), re.DOTALL).group()
    svg = ElementTree.fromstring(drawing)
    places = [(float(dot.get("cx")), float(dot.get("cy"))) for dot in svg.iter("circle") if float(dot.get("cy")) > 50]
    (x1, y1), (x2, y2), (x4, y4), (x5, y5) = places  # the third was given up
    assert x2 - x1 == pytest.approx((x4 - x2) / 2, abs=0.02) == pytest.approx(x5 - x4, abs=0.02)
    assert (y1 - y2) / (y1 - y4) == pytest.approx((0.9213 - 0.8911) / (0.9223 - 0.8911), abs=0.01) and y4 < y5


@pytest.mark.parametrize("is_public", [False, True])
def test_what_the_final_epsilon_covers_is_told(is_public):
    changes = {"epsilon_search_inclusive": 2.996123, "search_data": "digits"} if is_public else {}
    text = Page(render(search().model_copy(update=changes))).text
    assert "The final private run spends epsilon 2.997 at delta 1e-4." in text
    assert ("the search is not covered by the certificate of the final run" in text) != is_public
    assert ("looked at public images alone (digits): that covers the search, too" in text) == is_public


def test_a_search_whose_trials_were_all_given_up_has_a_page_without_a_chart():
    stages = [stage.model_copy(update={"accuracies": [None] * len(stage.tried)}) for stage in search().stages]
    text = render(search().model_copy(update={"stages": stages}))
    assert "<svg" not in text and "+2.13" in text
