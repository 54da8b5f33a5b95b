"""Probabilities that are as often right as they say, and thresholds that find what they were asked to."""

import functools
import json
import math

import pytest
import torch
from sklearn import metrics

from sfumato.errors import InputError
from sfumato.evaluation import calibration
from sfumato.evaluation.calibration import (
    Calibration,
    Threshold,
    fit_temperature,
    fit_temperature_and_shifts,
    fit_thresholds,
    with_offsets,
)
from sfumato.evaluation.evaluators import Outcome, auroc_of_each, decisions, reliability
from sfumato.evaluation.scores import Objective
from sfumato.evaluation.trained import load
from sfumato.run_folder.files import write_json
from tests.evaluation.test_trained import write_run


@functools.cache
def drawn(count, temperature, classes=3, seed=0):
    """Outputs that are `temperature` times too sure, with labels drawn from what they should say."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(count, classes, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(torch.softmax(logits, 1), 1, generator=generator)[:, 0]
    return logits * temperature, labels


@pytest.mark.parametrize("temperature", [0.2, 7.0])
def test_the_temperature_that_outputs_were_multiplied_by_is_found(temperature):
    logits, labels = drawn(20_000, temperature)
    found = fit_temperature(logits, labels)
    assert found == pytest.approx(temperature, rel=0.05)
    unseen, of_unseen = drawn(20_000, temperature, seed=1)
    fitted = Calibration(temperature=found, fitted_on="folder", num_images=1)
    calibrated = Outcome(unseen, of_unseen, "abc", fitted)
    assert dict(reliability(calibrated))["calibration_error"] < 0.02
    assert torch.equal(calibrated.decided, unseen.argmax(1))  # no decision changes


def test_shifts_follow_classes_that_are_more_frequent_than_in_training():
    """Outputs 3 times too sure; in front of the user the third class is 5 times as frequent."""
    logits, labels = drawn(60_000, 3.0)
    kept = torch.rand(60_000, generator=torch.Generator().manual_seed(1)) < torch.where(labels == 2, 1.0, 0.2)
    fit, judge = kept.nonzero()[:, 0].chunk(2)
    temperature, shifts = fit_temperature_and_shifts(logits[fit], labels[fit])
    assert temperature == pytest.approx(3.0, rel=0.05) and sum(shifts) == pytest.approx(0)
    assert shifts[2] - shifts[0] == pytest.approx(math.log(5), abs=0.15)
    share = float((labels[judge] == 2).double().mean())
    gaps = []
    for own in (shifts, None):
        found = Calibration(temperature=temperature, shifts=own, fitted_on="folder", num_images=1)
        gaps.append(abs(float(found.probabilities(logits[judge])[:, 2].mean()) - share))
    assert gaps[0] < 0.01 < 0.1 < gaps[1]
    few = torch.cat([torch.arange(60), (labels == 0).nonzero()[:60, 0]])
    few = few[(labels[few] != 1)]
    assert fit_temperature_and_shifts(logits[few], labels[few])[1] is None


def test_few_images_and_outputs_that_are_not_finite_have_none():
    logits, labels = drawn(60, 1.0)
    assert fit_temperature(logits[:49], labels[:49]) is None
    assert fit_temperature(logits, torch.zeros_like(labels)) is None  # of one class
    assert fit_temperature(logits.index_fill(0, torch.tensor([3]), math.nan), labels) is None
    right = torch.nn.functional.one_hot(labels, 3).double() * 5
    assert math.exp(-5) <= fit_temperature(right, labels) < 0.1  # a bound where nothing is wrong


@pytest.mark.parametrize(("aim", "at", "positive"), [("sensitivity", 0.95, "b"), ("specificity", 1.0, "a")])
def test_a_threshold_reaches_what_is_asked_and_holds_on_unseen_images(aim, at, positive):
    def outcome(seed, threshold=None):
        logits, labels = drawn(20_000, 1.0, classes=2, seed=seed)
        fitted = Calibration(temperature=1.0, fitted_on="folder", num_images=1, threshold=threshold)
        return Outcome(logits, labels, ("a", "b"), fitted)

    first = outcome(0)
    threshold = fit_thresholds(first.probabilities, first.labels, first.classes, positive=positive, aim=aim, at=at)[
        positive
    ]

    def shares(seed, threshold):
        return dict(decisions(outcome(seed, threshold)))["decision"].model_dump()

    reached, unseen = shares(0, threshold), shares(1, threshold)
    assert reached[aim] >= at and reached["positive"] == positive
    assert abs(unseen[aim] - at) < 0.02
    # No other threshold that reaches it gives less away.
    other = {"sensitivity": "specificity", "specificity": "sensitivity"}[aim]
    for probability in torch.linspace(0.0, 1.0, 100, dtype=torch.float64).tolist():
        moved = shares(0, threshold.model_copy(update={"probability": probability}))
        assert moved[aim] < at or moved[other] <= reached[other]


def test_of_thresholds_that_give_equally_little_away_the_one_that_gains_most_is_taken():
    """A gap between the classes: 90 % were asked for, and all can be had for nothing."""
    scores = torch.tensor([*torch.linspace(0.1, 0.3, 30).tolist(), *torch.linspace(0.7, 0.9, 30).tolist()])
    labels = (scores > 0.5).long()
    for aim in ("sensitivity", "specificity"):
        both = torch.stack([1 - scores, scores], 1)
        found = fit_thresholds(both, labels, ("well", "ill"), positive="ill", aim=aim, at=0.9)["ill"]
        assert found.probability == pytest.approx(0.5)  # half way: no image's own score


def test_four_counts_and_the_shares_that_follow_by_hand():
    labels = torch.tensor([1] * 10 + [0] * 30)
    scores = torch.tensor([0.9] * 8 + [0.1] * 2 + [0.9] * 3 + [0.1] * 27, dtype=torch.float64)
    logits = torch.stack([torch.log(1 - scores), torch.log(scores)], 1)
    found = dict(decisions(Outcome(logits, labels, ("well", "ill")), 0.02))["decision"]
    assert found.counts == {"found": 8, "missed": 2, "false_alarms": 3, "left_alone": 27}
    assert (found.positive, found.sensitivity, found.specificity) == ("ill", 0.8, 0.9)
    assert found.positive_predictive_value == pytest.approx(0.8 * 0.02 / (0.8 * 0.02 + 0.1 * 0.98))
    assert found.negative_predictive_value == pytest.approx(0.9 * 0.98 / (0.9 * 0.98 + 0.2 * 0.02))
    assert dict(decisions(Outcome(logits, labels, ("well", "ill"))))["decision"].prevalence == 0.25
    assert not list(decisions(Outcome(torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64), "abc")))


def test_thresholds_that_cannot_be_are_refused():
    for classes, changes, says in (
        ("abc", {}, "two classes"),
        ("ab", {"positive": "c"}, "no class 'c'"),
        ("ab", {"at": 0.0}, "no share"),
        ("ab", {"positive": "b"}, "19 images are too few to find a sensitivity"),
        ("ab", {"aim": "specificity"}, "19 images are too few to find a specificity"),
    ):
        asked = {"positive": "a", "aim": "sensitivity", "at": 0.9, **changes}
        with pytest.raises(InputError, match=says):
            fit_thresholds(torch.full((60, len(classes)), 0.5), (torch.arange(60) < 19).long(), classes, **asked)


def test_the_threshold_decides_at_itself():
    logits = torch.log(torch.tensor([[0.7, 0.3], [0.71, 0.29], [0.2, 0.8]], dtype=torch.float64))
    plain = Calibration(temperature=1.0, fitted_on="folder", num_images=60)
    at = float(plain.probabilities(logits)[0, 1])
    threshold = Threshold(positive="b", probability=at, aim="sensitivity", at=0.9)
    with_threshold = plain.model_copy(update={"threshold": threshold})
    assert with_threshold.decided(logits, ("a", "b")).tolist() == [1, 0, 1]
    assert plain.decided(logits, ("a", "b")).tolist() == [0, 0, 1]


def test_with_public_proportions_the_decision_is_balanced_and_the_probability_is_the_class_s_own():
    """Classes as often as the proportions say, outputs that the adjusted loss would learn: what is shown is as often
    right as it says, and what is named is what balanced classes ask for.
    """
    generator, proportions = torch.Generator().manual_seed(0), (0.9, 0.1)
    prior = torch.tensor(proportions, dtype=torch.float64)
    labels = torch.multinomial(prior.repeat(40_000, 1), 1, generator=generator)[:, 0]
    seen = torch.randn(40_000, generator=generator, dtype=torch.float64) + labels  # one number an image: N(class, 1)
    balanced = torch.stack([torch.zeros_like(seen), seen - 0.5], 1)  # log-likelihoods of the two classes
    objective = Objective(proportions)
    probable = with_offsets(objective.decision_logits(balanced), objective.offsets)
    torch.testing.assert_close(torch.softmax(probable, 1), torch.softmax(balanced + torch.log(prior), 1))
    temperature = fit_temperature(probable, labels)
    assert temperature == pytest.approx(1.0, rel=0.05)
    fitted = Calibration(temperature=temperature, offsets=objective.offsets, fitted_on="held-out", num_images=40_000)
    outcome = Outcome(objective.decision_logits(balanced), labels, ("a", "b"), fitted)
    assert dict(reliability(outcome))["calibration_error"] < 0.02
    assert float(outcome.probabilities[:, 1].mean()) == pytest.approx(0.1, abs=0.01)
    assert torch.equal(outcome.decided, objective.decision_logits(balanced).argmax(1))


def test_what_the_owner_fitted_comes_before_what_the_weights_carry_and_damage_is_said(tmp_path):
    of_weights = Calibration(temperature=2.0, fitted_on="held-out", num_images=100)
    assert calibration.read(tmp_path, None) is None
    assert calibration.read(tmp_path, of_weights.model_dump_json()) == of_weights
    own = of_weights.model_copy(update={"temperature": 3.0, "fitted_on": "folder"})
    write_json(tmp_path / calibration.CALIBRATION_FILE, own.as_json())
    assert calibration.read(tmp_path, of_weights.model_dump_json()) == own
    for text in ("{", '{"temperature": NaN}', '{"temperature": 1e999}'):
        (tmp_path / calibration.CALIBRATION_FILE).write_text(text)
        with pytest.raises(InputError, match="is damaged"):
            calibration.read(tmp_path, None)


def test_calibration_error_is_of_the_class_that_is_named_and_ranks_are_of_what_is_shown():
    logits = torch.log(torch.tensor([[0.8, 0.2]], dtype=torch.float64)).repeat(1000, 1)
    labels = (torch.arange(1000) % 5 == 0).long()
    plain = Calibration(temperature=1.0, fitted_on="held-out", num_images=1000)
    threshold = Threshold(positive="ill", probability=0.1, aim="sensitivity", at=0.95)
    for found in (plain, plain.model_copy(update={"threshold": threshold})):
        assert dict(reliability(Outcome(logits, labels, ("well", "ill"), found)))["calibration_error"] < 1e-9
    logits, _ = drawn(3_000, 6.0)
    shifted = Calibration(temperature=6.0, shifts=[4.0, -2.0, -2.0], fitted_on="folder", num_images=50)
    probabilities = shifted.probabilities(logits)
    labels = torch.multinomial(probabilities, 1, generator=torch.Generator().manual_seed(0))[:, 0]
    told = dict(auroc_of_each(Outcome(logits, labels, "abc", shifted)))["auroc_per_class"]
    by_probability = [metrics.roc_auc_score(labels == k, probabilities[:, k]) for k in range(3)]
    assert told == pytest.approx(by_probability)


def test_a_share_that_saturated_probabilities_allow_is_reached():
    probabilities = torch.tensor([[0.0, 1.0]] * 10 + [[0.9, 0.1]] * 90 + [[0.0, 1.0]] * 5, dtype=torch.float64)
    labels = torch.tensor([0] * 100 + [1] * 5)
    found = fit_thresholds(probabilities, labels, ("well", "ill"), positive="ill", aim="specificity", at=0.95)["ill"]
    assert float((probabilities[:100, 1] < found.probability).double().mean()) >= 0.95
    Threshold.model_validate_json(found.model_dump_json())


def test_a_calibration_that_cannot_be_is_refused_in_one_line(tmp_path):
    run = write_run(tmp_path / "run")
    for changes in (
        {"temperature": 0.0},
        {"shifts": [1.0, 2.0, 3.0]},
        {"threshold": {"positive": "a", "probability": 5.0, "aim": "sensitivity", "at": 0.9}},
        {"threshold": {"positive": "z", "probability": 0.5, "aim": "sensitivity", "at": 0.9}},
    ):
        told = {"temperature": 1.0, "fitted_on": "folder", "num_images": 50, **changes}
        (run / calibration.CALIBRATION_FILE).write_text(json.dumps(told))
        with pytest.raises(InputError, match="is damaged|of other classes"):
            load(run)
