"""The page of an audit: true to its numbers, and complete by itself."""

import math
import re

import numpy as np
import pytest

from sfumato.accounting import accountants
from sfumato.accounting.mechanism import Mechanism
from sfumato.auditing import page as pages
from sfumato.auditing.bounds import audit_scores
from sfumato.auditing.canary import audit_canary
from sfumato.auditing.membership import Audit
from sfumato.errors import InputError
from sfumato.models.small import LeNet
from sfumato.reporting.charts import WIDTHS
from sfumato.run_folder.files import refuse_drawing
from tests.auditing.test_membership import made_up_task
from tests.reporting.test_page import Page


def games(shift=1.0, count=2000):
    members = np.arange(count) % 2
    return np.random.default_rng(0).normal(size=count) + shift * members, members


def page_of(scores, members, epsilon=1.0):
    found = audit_scores(scores, members, delta=0.01, nominal_epsilon=epsilon)
    return pages.render(found, np.asarray(scores), np.asarray(members))


@pytest.mark.parametrize("digits", [8, 0])
def test_rates_are_those_of_the_best_threshold_with_no_more_false_alarms(digits):
    """With ties too: by trying every threshold."""
    scores, members = games(count=300)
    scores = scores.round(digits)
    inside, outside = np.sort(scores[members == 1]), np.sort(scores[members == 0])
    rates = np.array([0.001, 0.01, 0.1, 0.5, 0.9, 1.0])
    false_positives, true_positives = pages.counted_rates(inside, outside, rates)
    tried = [((outside >= t).mean(), (inside >= t).mean()) for t in [-math.inf, *np.unique(scores), math.inf]]
    for rate, got in zip(rates, zip(false_positives, true_positives, strict=True), strict=True):
        assert got[1] == max(true for false, true in tried if false <= rate) and got[0] <= rate


def test_the_page_has_two_charts_each_told_in_words_and_needs_nothing_from_elsewhere():
    text = page_of(*games())
    page = Page(text)
    figures = [attributes["aria-labelledby"] for tag, attributes in page.elements if tag == "svg"]
    assert figures == [f"{name}-title {name}-description" for name in ("rates", "sides") for _ in WIDTHS]
    names = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(names) == len(set(names))
    assert "default-src 'none'" in text and not re.search(r"https?://|url\(", text)


def test_bounds_on_the_page_are_the_audit_s():
    scores, members = games(3.0)
    found = audit_scores(scores, members, delta=0.01, nominal_epsilon=1.0)
    text = Page(pages.render(found, scores, members)).text
    assert found.violated and "The claim of epsilon 1 is refuted" in text
    for bound in found.bounds:
        digits = 4 - len(str(math.floor(bound.epsilon)))  # four in all, rounded down
        assert f"{bound.name} {math.floor(10**digits * bound.epsilon) / 10**digits:g}" in text
        assert f"{bound.false_positives} of {bound.num_non_members}" in text


@pytest.mark.parametrize("epsilon, words", [(None, "Nothing is claimed"), (50.0, "epsilon 50 is not refuted")])
def test_no_claim_and_a_claim_that_holds_are_told_as_such(epsilon, words):
    text = Page(page_of(*games(), epsilon)).text
    assert words in text and ("no proof" in text) == (epsilon is not None) and "is refuted" not in text


@pytest.mark.parametrize("scores", [[0.0] * 400, [-math.inf, math.inf] * 200, [1e308, -1e308] * 200])
def test_scores_that_are_all_alike_or_infinite_have_a_page(scores):
    assert "</svg>" in page_of(scores, [0, 1] * 200)


def test_what_a_canary_audit_s_page_allows_is_the_mechanism_whose_epsilon_is_claimed():
    kept = []
    found = audit_canary(epsilon=2.0, delta=1e-5, num_steps=2, num_games=1000, keep=lambda *games: kept.append(games))
    (scores, members), mechanism = kept[0], pages.mechanism_of(found)
    assert accountants.epsilon(mechanism, 1e-5).epsilon == found.nominal_epsilon
    assert len(scores) == len(members) == found.num_games and 0.3 < members.mean() < 0.7
    assert "by the mechanism" in pages.render(found, scores, members)


def test_what_a_membership_audit_s_page_allows_is_the_mechanism_whose_epsilon_is_claimed():
    task, kept = made_up_task(side=28), []
    audit = Audit(task, LeNet(10), 8.0, 0.01, 24, fixed_batches=True)
    found = audit.run(0.9, keep=lambda *games: kept.append(games))
    assert accountants.epsilon(pages.mechanism_of(found), 0.01).epsilon == found.nominal_epsilon
    (scores, members) = kept[0]
    assert len(scores) == 48 and members.sum() == 24
    text = pages.render(found, scores, members)
    assert "Loss on the example" in text and "Membership" in text


@pytest.mark.parametrize(
    "name, words", [("audit.txt", "ends in .html"), ("none/audit.html", "Make it"), ("a.html", "a folder")]
)
def test_a_page_that_cannot_be_written_is_refused_before_the_audit(tmp_path, name, words):
    (tmp_path / "a.html").mkdir()
    with pytest.raises(InputError, match=words):
        refuse_drawing(tmp_path / name, "--page", (".html", ".htm"))


def test_the_claim_of_an_epsilon_is_the_line_of_both_inequalities():
    rates = np.array([0.0, 0.01, 0.5, 1.0])
    expected = [0.01, 0.01 * math.e + 0.01, 1 - (0.5 - 0.01) / math.e, 1.0]
    np.testing.assert_allclose(pages._of_pair(1.0, 0.01, rates), expected)
    assert pages.mechanism_of(audit_scores(*games(), delta=0.01)) is None
    mechanism = Mechanism(1000, 100, 2.0, 20)
    epsilon = accountants.epsilon(mechanism, 0.01).epsilon
    own = pages.true_positive_rates(mechanism, rates.tolist())
    assert (own <= pages._of_pair(epsilon, 0.01, rates) + 1e-9).all()  # the pair says less
