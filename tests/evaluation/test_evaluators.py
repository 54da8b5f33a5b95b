"""What is said of decisions beside their accuracy, against scikit-learn and by counting."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import binomtest
from sklearn import metrics

from sfumato.evaluation.evaluators import (
    BINS,
    Outcome,
    auroc_of_each,
    confusion,
    intervals,
    reliability,
    sensitivity_at,
    wilson,
)


def an_outcome(count=300, classes=4, seed=0, ties=False):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (count,), generator=generator)
    logits = torch.randn(count, classes, generator=generator) + torch.eye(classes)[labels]
    return Outcome((logits.round() if ties else logits).double(), labels, [f"class {i}" for i in range(classes)])


def error_of(outcome):
    return dict(reliability(outcome))["calibration_error"]


def value(evaluator, outcome):
    ((_, found),) = evaluator(outcome)
    return found


def test_the_confusion_matrix_has_labels_in_rows():
    outcome = an_outcome()
    expected = metrics.confusion_matrix(outcome.labels, outcome.decided, labels=range(4))
    assert value(confusion, outcome) == expected.tolist()


@pytest.mark.parametrize(("classes", "ties"), [(2, True), (4, False)])
def test_auroc_is_each_class_against_the_rest(classes, ties):
    outcome = an_outcome(classes=classes, ties=ties)
    logits = outcome.logits.numpy()
    for place, found in enumerate(value(auroc_of_each, outcome)):
        others = np.delete(logits, place, 1)
        scores = logits[:, place] - np.logaddexp.reduce(others, axis=1)
        assert found == pytest.approx(metrics.roc_auc_score(outcome.labels == place, np.round(scores, 12)), abs=1e-3)


def test_one_side_alone_has_no_auroc_and_no_sensitivity():
    outcome = Outcome(torch.randn(5, 3).double(), torch.zeros(5, dtype=torch.int64), list("abc"))
    assert value(auroc_of_each, outcome) == [None, None, None]
    assert dict(sensitivity_at(outcome, 0.9))["sensitivity_per_class"] == [None, None, None]


@pytest.mark.parametrize(("specificity", "ties"), [(0.0, False), (0.95, True), (1.0, False)])
def test_sensitivity_is_the_best_threshold_s_that_keeps_the_specificity(specificity, ties):
    outcome = an_outcome(count=97, ties=ties)
    found = dict(sensitivity_at(outcome, specificity))
    assert found["specificity"] == specificity
    odds = outcome.probabilities.logit()
    for place, sensitivity in enumerate(found["sensitivity_per_class"]):
        own, scores = outcome.labels == place, odds[:, place].round(decimals=9)
        thresholds = torch.tensor([-math.inf, *scores.tolist()], dtype=torch.float64)[:, None]
        left = (scores[~own] <= thresholds).double().mean(1)
        named = (scores[own] > thresholds).double().mean(1)[left >= specificity - 1e-12]
        assert sensitivity == pytest.approx(float(named.max()))


def test_calibration_error_is_the_sum_over_bins_by_hand():
    outcome = an_outcome(count=500)
    sureness, decided = outcome.probabilities.max(1)
    right, total = (decided == outcome.labels).double(), 0.0
    for number in range(BINS):
        inside = (sureness > number / BINS) & (sureness <= (number + 1) / BINS)
        if inside.any():
            total += float(inside.double().mean() * (right[inside].mean() - sureness[inside].mean()).abs())
    assert error_of(outcome) == pytest.approx(total)


def test_a_calibrated_model_s_error_is_small_and_a_sure_wrong_one_s_is_one():
    generator = torch.Generator().manual_seed(0)
    share = torch.rand(200_000, 1, generator=generator, dtype=torch.float64)
    labels = (torch.rand(200_000, generator=generator) < share[:, 0]).long()
    calibrated = Outcome(torch.cat([torch.zeros_like(share), share.logit()], 1), labels, ["no", "yes"])
    assert error_of(calibrated) < 0.01
    wrong = Outcome(torch.tensor([[50.0, 0.0]] * 4).double(), torch.ones(4, dtype=torch.int64), ["no", "yes"])
    assert error_of(wrong) == pytest.approx(1.0)


def test_outputs_that_are_not_finite_are_told_apart_and_end_nothing():
    outcome = Outcome(torch.tensor([[math.nan, 0.0], [1.0, 0.0]]), torch.tensor([0, 1]), ["a", "b"])
    assert error_of(outcome) is None and value(auroc_of_each, outcome) == [None, None]
    assert sum(map(sum, value(confusion, outcome))) == 2


def test_the_interval_is_scipy_s():
    for hits, count in ((0, 10), (3, 10), (10, 10)):
        assert wilson(hits, count) == pytest.approx(binomtest(hits, count).proportion_ci(method="wilson"))
    assert wilson(0, 0) is None


def test_the_gap_is_between_the_best_and_the_worst_class_that_occur():
    logits, labels = torch.eye(3)[[0, 0, 1, 0]].double(), torch.tensor([0, 0, 1, 1])
    found = dict(intervals(Outcome(logits, labels, list("abc"))))
    assert found["class_gap"] == pytest.approx(0.5) and found["intervals"].per_class[2] is None


def test_the_interval_of_an_area_covers_the_true_one_95_times_in_100():
    """Scores N(0, 1) and N(1, 1): the true area is Phi(1 / sqrt 2)."""
    truth, hits = 0.5 * (1 + math.erf(1 / math.sqrt(2) / math.sqrt(2))), 0
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        labels = (torch.rand(150, generator=generator) < 0.3).long()
        scores = torch.randn(150, generator=generator, dtype=torch.float64) + labels
        outcome = Outcome(torch.stack([torch.zeros_like(scores), scores], 1), labels, ("a", "b"))
        low, high = dict(intervals(outcome))["intervals"].auroc
        hits += low <= truth <= high
    assert 0.88 <= hits / 60 <= 1
    assert dict(intervals(Outcome(torch.zeros(4, 2), torch.zeros(4).long(), ("a", "b"))))["intervals"].auroc is None
